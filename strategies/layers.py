"""What the strategies of all layers have in common: sizes that are cut, token dimensions, rare options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import strategies as st

from reference.linear import Backward
from reference.recipe import EXACT_KINDS, Recipe

#: The largest size of a dimension.
LARGEST = 12
MOST_MICRO_BATCHES = 3
#: Of one micro-batch: the gradients of all still sum exactly in bf16, which holds whole numbers up to 256.
_MOST_TOKENS = 256 // MOST_MICRO_BATCHES
#: When backward runs, the plainest first.
BACKWARD: list[Backward] = [*["immediate"] * 3, *["delayed", "reversed"] * 2, "never"]  # type: ignore[list-item]

Leading = tuple[tuple[int, ...], ...]
#: What is wrong with a case that must be refused.
Kind = TypeVar("Kind", bound=str)


def scattered(recipe: Recipe) -> Recipe:
    """Normal data in place of few different numbers: equal elements round alike, and many of them lean together."""
    return Recipe("normal", recipe.seed) if recipe.kind in EXACT_KINDS else recipe


def one_in(draw: st.DrawFn, n: int) -> bool:
    """True in one of n cases; False is simpler."""
    return draw(st.integers(0, n - 1)) == n - 1


def what_to_refuse(draw: st.DrawFn, n: int, others: Sequence[Kind], states: Sequence[Kind]) -> Kind | None:
    """What a candidate must refuse, in one of n cases, or nothing. They are cheap, and each kind is another fault.

    states: kinds of saved states, each twice as frequent: a load that refuses must also leave all as it was.
    """
    kinds = [*others, *states, *states]
    return draw(st.sampled_from(kinds)) if kinds and one_in(draw, n) else None


def cut_length(draw: st.DrawFn, n: int, uneven: bool) -> int:
    """A length that is cut n ways."""
    if uneven:
        return draw(st.integers(1, LARGEST))
    return n * draw(st.integers(1, max(1, LARGEST // n)))


def alike(draw: st.DrawFn, shapes: list[tuple[int, ...]]) -> Leading:
    """The shapes; in one case of three all as the first. What keeps something of one call for the next one, a buffer or
    a mask, may fail by itself where shapes differ."""
    return (shapes[0],) * len(shapes) if one_in(draw, 3) else tuple(shapes)


@st.composite
def leadings(draw: st.DrawFn, dims: int, first: int) -> Leading:
    """The token dimensions of each micro-batch, ``dims`` of them, the first at most ``first``."""
    return alike(draw, draw(st.lists(_tokens(dims, first), min_size=1, max_size=MOST_MICRO_BATCHES)))


def divisible(leading: Leading, n: int) -> Leading:
    """The same with a first dimension that n divides."""
    return tuple((max(n, dims[0] // n * n), *dims[1:]) for dims in leading)


def tiny(leading: Leading) -> list[Leading]:
    """Few tokens, with as many dimensions, and ``leading`` itself."""
    rest = (1,) * (len(leading[0]) - 1)
    one, two = ((1, *rest),), ((2, *rest),)
    return [one, two, one + one, leading]


@st.composite
def _tokens(draw: st.DrawFn, dims: int, first: int) -> tuple[int, ...]:
    """The token dimensions of a micro-batch; micro-batches differ in all but their number."""
    # Always three choices: where their number changes, shrinking loses its way.
    sizes = [draw(st.sampled_from([first, max(1, first - 1), max(1, first // 2)]))]
    room = _MOST_TOKENS // first
    for _ in range(dims - 1):
        sizes.append(draw(st.integers(1, max(1, min(3, room)))))
        room //= sizes[-1]
    return tuple(sizes)
