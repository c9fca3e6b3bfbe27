"""Magnitudes for which sums of products are exact in a format, in any order.

Whole numbers up to 2^p are representable with p significand bits. So if the sum of the absolute values of all terms of
a result is at most 2^p, every partial sum, in any order and however it is spread over ranks, is a whole number at
most 2^p, and no operation rounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Larger magnitudes add nothing: two different sums hardly ever agree by chance any more.
LARGEST_USEFUL = 31


@dataclass(frozen=True)
class Term:
    """``count`` products, each of one element of every named tensor, added into a result."""

    count: int
    factors: tuple[str, ...]


@dataclass(frozen=True)
class Sum:
    """A result of a case: the terms that add up to one of its elements, with ``precision`` significand bits."""

    terms: tuple[Term, ...]
    precision: int

    def bound(self, limits: Mapping[str, int]) -> int:
        """The largest sum of absolute values that the terms can reach."""
        return sum(term.count * math.prod(limits[name] for name in term.factors) for term in self.terms)

    def exact(self, limits: Mapping[str, int]) -> bool:
        """Whether no sum can round."""
        return self.bound(limits) <= int(2**self.precision)


def lattice_limits(sums: Sequence[Sum]) -> dict[str, int]:
    """The largest magnitude for each tensor, such that every sum is exact.

    Magnitudes are raised in turn, so that the tensors share the room. Raises ValueError where even magnitude 1 does
    not fit.
    """
    return dict(_limits(tuple(sums)))


@functools.cache
def _limits(sums: tuple[Sum, ...]) -> dict[str, int]:
    names = sorted({name for one in sums for term in one.terms for name in term.factors})
    limits = dict.fromkeys(names, 1)
    for one in sums:
        if not one.exact(limits):
            raise ValueError(
                f"a sum of {one.bound(limits)} terms cannot be exact with {one.precision} significand bits: "
                f"at most {2**one.precision} terms; make the sizes smaller"
            )
    growing = list(names)
    while growing:
        for name in list(growing):
            larger = {**limits, name: limits[name] + 1}
            if larger[name] <= LARGEST_USEFUL and all(one.exact(larger) for one in sums):
                limits = larger
            else:
                growing.remove(name)
    return limits
