"""Two statistics of a tensor on ranks against its computed spread: the worst element, and the slope. NaN-safe.

``worst`` is the largest |got - want| over what rounding alone explains. ``slope`` is the projection of got - want on
want over the same of the disturbed runs: a factor common to many elements moves it long before it moves any element out
of its tolerance. Both are 1 or a little more for right code, hardly depending on dtype, shape or mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference.layout import Layout, window
from reference.mesh import Mesh

Values = NDArray[np.float64]

#: Two results of one process are the same number where so many leading bits agree.
_SAME_BITS = 44


@dataclass(frozen=True, eq=False)
class Expected:
    """What one process computes of one tensor, and how far rounding alone moves it: float64 arrays.

    want, tolerance, ambiguous: of the global shape; residuals: [K, *shape], disturbed - want of K runs. The tolerance
    of an element is one unit of ``worst``. Where ``ambiguous``, rounding decides whether there is a finite value, and
    any is right. smallest_normal: of the format. Below it numbers round to zero, all the same way, and no slope can be
    told from that. square: these are squares, or sums of squares, and the slope is that of their roots, as the
    tolerance is.
    """

    want: Values
    tolerance: Values
    residuals: Values
    ambiguous: NDArray[np.bool_]
    smallest_normal: float = 0.0
    square: bool = False


@dataclass(frozen=True)
class Statistic:
    """A value, and where it is: the rank, or None for all ranks together; for ``worst`` the local index."""

    value: float
    rank: int | None
    index: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class Part:
    """One rank's part of a tensor: its values and the same window of everything expected."""

    rank: int
    got: Values
    want: Values
    tolerance: Values
    residuals: Values
    free: NDArray[np.bool_]
    smallest_normal: float
    square: bool = False

    @property
    def sloped(self) -> NDArray[np.bool_]:
        """The elements that tell of a common factor."""
        return np.isfinite(self.want) & np.isfinite(self.got) & ~self.free & (np.abs(self.want) >= self.smallest_normal)

    def along(self) -> tuple[Values, Values, Values]:
        """What is wanted, what came, and the residuals, [K, elements], of the elements that tell of a common factor."""
        at = self.sloped
        want, got, residuals = self.want[at], self.got[at], self.residuals[:, at]
        if not self.square:
            return want, got, residuals
        return _root(want), _root(got), _root(want + residuals) - _root(want)


def parts(expected: Expected, layout: Layout, mesh: Mesh, got: Sequence[Values]) -> list[Part]:
    """Each rank's part; ``got`` holds the local values, already summed where the layout is partial."""
    made = []
    for rank, values in enumerate(got):
        cut = window(expected.want.shape, layout, mesh, rank)
        runs = np.stack([cut.take(run) for run in expected.residuals])
        made.append(
            Part(
                rank,
                values,
                cut.take(expected.want),
                cut.take(expected.tolerance),
                runs,
                cut.take(expected.ambiguous),
                expected.smallest_normal,
                expected.square,
            )
        )
    return made


def ratios(part: Part) -> Values:
    """|got - want| of each element in units of its tolerance: 0 where nothing is wrong, inf where no rounding explains
    it, so a NaN or an infinity in the wrong place."""
    same = (part.got == part.want) | (np.isnan(part.got) & np.isnan(part.want)) | part.free
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratio = np.abs(part.got - part.want) / part.tolerance
    return np.where(same, 0.0, np.where(np.isnan(ratio) | ~np.isfinite(part.want), np.inf, ratio))


def worst(found: Sequence[Part]) -> Statistic:
    """The largest ratio on any rank."""
    best = Statistic(0.0, None)
    for part in found:
        ratio = ratios(part)
        if ratio.size and ratio.max() > best.value:
            at = np.unravel_index(int(ratio.argmax()), ratio.shape)
            best = Statistic(float(ratio.max()), part.rank, tuple(int(i) for i in at))
    return best


def slope(found: Sequence[Part]) -> Statistic:
    """The largest slope of one rank's part or of all ranks together."""
    together = _slope(found)
    best = Statistic(together, None)
    for part in found if len(found) > 1 else ():
        alone = _slope([part])
        if alone > best.value:
            best = Statistic(alone, part.rank)
    return best


def _slope(found: Sequence[Part]) -> float:
    along = [part.along() for part in found]
    want = np.concatenate([one[0] for one in along])
    if not want.any():
        return 0.0
    got = np.concatenate([one[1] for one in along])
    residuals = np.concatenate([one[2] for one in along], axis=1)
    # Scaled by a power of two: near the largest or smallest numbers the products would leave the format.
    scaled = np.ldexp(want, -math.frexp(float(np.abs(want).max()))[1])
    lean = abs(float((got - want) @ scaled))
    if lean == 0:
        return 0.0
    alike = _alike(want, got)
    runs = residuals @ scaled if alike is None else residuals[:, alike[0]] @ (scaled[alike[0]] * alike[1])
    largest = float(np.abs(runs).max())
    if largest == 0:
        return math.inf
    return lean / largest / math.sqrt(float(np.mean(np.square(runs / largest))))  # no square leaves float64


def _root(values: Values) -> Values:
    """With the sign, which a square that is wrong may have."""
    return np.asarray(np.copysign(np.sqrt(np.abs(values)), values))


def _alike(want: Values, got: Values) -> tuple[NDArray[np.intp], NDArray[np.intp]] | None:
    """Of elements that are the same and came out the same, but for the sign, the first, and their number: they were
    computed from the same numbers, and round together, where a disturbed run moves each by itself. None where no two
    are alike."""
    if np.unique(got).size == got.size:
        return None
    mantissa, exponent = np.frexp(np.abs(want))
    known = np.ldexp(np.round(np.ldexp(mantissa, _SAME_BITS)), exponent - _SAME_BITS)  # a reference rounds too
    pairs = known + 1j * got * np.sign(want)  # sorts faster than rows
    _, first, counts = np.unique(pairs, return_index=True, return_counts=True)
    return (first, counts) if first.size < got.size else None
