"""Magnitudes for which sums of products are exact in a format, in any order.

Whole numbers up to 2^p are representable with p significand bits. So if the sum of the absolute values of all terms of
a result is at most 2^p, every partial sum, in any order and however it is spread over ranks, is a whole number at
most 2^p, and no operation rounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Larger magnitudes add nothing: two different sums hardly ever agree by chance any more.
LARGEST_USEFUL = 31


@dataclass(frozen=True)
class Term:
    """``count`` products, each of one element of every named tensor, added into a result."""

    count: int
    factors: tuple[str, ...]


#: A result of a case: the terms that add up to one of its elements.
Result = tuple[Term, ...]


def bound(result: Result, limits: dict[str, int]) -> int:
    """The largest sum of absolute values that the result's terms can reach."""
    return sum(term.count * math.prod(limits[name] for name in term.factors) for term in result)


def lattice_limits(results: Sequence[Result], precision: int) -> dict[str, int]:
    """The largest magnitude for each tensor, such that every result is exact with ``precision`` significand bits.

    Magnitudes are raised in turn, so that the tensors share the room. Raises ValueError where even magnitude 1 does
    not fit.
    """
    return dict(_limits(tuple(results), precision))


@functools.cache
def _limits(results: tuple[Result, ...], precision: int) -> dict[str, int]:
    names = sorted({name for result in results for term in result for name in term.factors})
    limits = dict.fromkeys(names, 1)
    worst = max((bound(result, limits) for result in results), default=0)
    if worst > 2**precision:
        raise ValueError(
            f"a sum of {worst} terms cannot be exact with {precision} significand bits: "
            f"at most {2**precision} terms; make the sizes smaller"
        )
    growing = list(names)
    while growing:
        for name in list(growing):
            larger = {**limits, name: limits[name] + 1}
            fits = all(bound(result, larger) <= 2**precision for result in results)
            if fits and larger[name] <= LARGEST_USEFUL:
                limits = larger
            else:
                growing.remove(name)
    return limits
