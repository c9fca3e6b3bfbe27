"""Whether an explanation fits what the ranks hold, and whether it could fit by chance.

An explanation says what every rank would hold. It fits where each rank with a wrong element holds just that. Small
tensors of small integers fit many explanations, so a fit is only worth saying when the errors that it explains carry
more information than it takes to choose it among its alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.oracle.compare import different
from harness.oracle.patterns.evidence import Evidence
from harness.oracle.patterns.formats import format_named, grid, rounded, ulp

Values = NDArray[np.float64]

#: No single error counts for more: a coincidence of real numbers is as good as excluded by 20 bits.
_MOST_BITS = 20.0


@dataclass(frozen=True, eq=False)
class Explanation:
    """What every rank would hold, and how far off each element may still be (of the local shapes).

    allowed: None to work it out, see `allowances`.
    """

    values: tuple[Values, ...]
    allowed: tuple[Values, ...] | None = None


@dataclass(frozen=True)
class Fit:
    """ranks: those with wrong elements, all of them explained. everywhere: the right ranks hold what the explanation
    says too. errors: the bits of each independent error that it explains, the largest first."""

    ranks: tuple[int, ...]
    everywhere: bool
    errors: tuple[float, ...]

    def sure(self, evidence: Evidence, choices: float = 1.0, fitted: int = 0) -> bool:
        """Whether it is no coincidence.

        choices: among how many alternatives the explanation was chosen. fitted: how many real numbers were fitted to
        the data; each uses up one error.
        """
        cost = math.log2(max(1.0, choices)) + (0 if self.everywhere else evidence.mesh.size)
        return sum(self.errors[fitted:]) >= evidence.margin + cost


def fit(evidence: Evidence, explanation: Explanation) -> Fit | None:
    """How the explanation fits, or None where a wrong rank holds something else or nothing is wrong."""
    allowed = explanation.allowed or allowances(evidence, explanation.values)
    held = [
        not beyond(got, values, room).any()
        for got, values, room in zip(evidence.got, explanation.values, allowed, strict=True)
    ]
    wrong = evidence.wrong_ranks
    if not wrong or not all(held[rank] for rank in wrong):
        return None
    return Fit(wrong, all(held), information(evidence, allowed))


def beyond(got: Values, values: Values, allowed: Values) -> NDArray[np.bool_]:
    """Where two arrays are further apart than allowed; NaN is near NaN only, and infinity near itself."""
    with np.errstate(invalid="ignore"):
        near = np.abs(got - values) <= allowed
    far: NDArray[np.bool_] = different(got, values) & ~near & ~np.isposinf(allowed)
    return far


def allowances(evidence: Evidence, values: Sequence[Values]) -> tuple[Values, ...]:
    """How far off an element may be from what another computation than the right one gives.

    Exact data: not at all, but where the format cannot hold all the values, one unit in the last place. Otherwise
    twice the tolerance, or twice its root mean square where that is more: other terms were summed than those that the
    tolerance was computed for.
    """
    if evidence.limits is None:
        fmt = format_named(evidence.dtype)
        if any(different(rounded(part, fmt), part).any() for part in values):
            return tuple(ulp(part, fmt) for part in values)
        return tuple(np.zeros(part.shape) for part in values)
    assert evidence.tolerance is not None
    known = evidence.tolerance[np.isfinite(evidence.tolerance)]
    largest = float(known.max(initial=0.0))  # near the largest numbers a square would leave the format
    usual = largest * math.sqrt(float(np.mean(np.square(known / largest)))) if largest else 0.0
    return tuple(2 * np.maximum(limit, usual) for limit in evidence.limits)


def information(evidence: Evidence, allowed: Sequence[Values]) -> tuple[float, ...]:
    """The bits of each independent error, the largest first.

    An error carries the logarithm of its size in steps that could have been told apart. Replicas count once, and so do
    equal slices of a tensor and equal errors, which structured data repeats.
    """
    step = max(grid(evidence.want), 1e-300) if evidence.limits is None else 0.0
    errors: list[Values] = []
    seen: set[tuple[object, bytes]] = set()
    for rank in evidence.wrong_ranks:
        got, want, part = evidence.got[rank], evidence.wants[rank], evidence.windows[rank]
        key = ((part.lead, part.ranges), got.tobytes())
        if key in seen:
            continue
        seen.add(key)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            steps = np.abs(got - want) / np.maximum(np.maximum(allowed[rank], step), 1e-300)
        steps = np.where(evidence.wrong[rank] & np.isfinite(steps), np.sign(got - want) * steps, 0.0)
        errors.append(_without_repeats(np.nan_to_num(steps)))
    found = np.concatenate([e.ravel() for e in errors]) if errors else np.zeros(0)
    found = found[found != 0]
    sizes, counts = np.unique(np.round(found, 3), return_counts=True)
    codebook = np.minimum(np.log2(1 + np.abs(sizes)), _MOST_BITS)
    # Many errors of few sizes: where each of them stands tells too.
    places = -np.log2(counts / max(1, counts.sum()))
    if codebook.sum() >= (counts * places).sum():
        return tuple(sorted((float(bits) for bits in codebook), reverse=True))
    return tuple(sorted((float(bits) for bits in np.repeat(places, counts)), reverse=True))


def _without_repeats(values: Values) -> Values:
    """The array with equal slices along any dimension only once."""
    for dim in range(values.ndim):
        if values.size:
            values = np.unique(values, axis=dim)
    return values
