"""The right values in a lower precision than the tensor's."""

from __future__ import annotations

import math

import numpy as np

from harness.oracle.compare import different
from harness.oracle.patterns.evidence import Evidence
from harness.oracle.patterns.formats import format_named, grid, rounded, ulp
from harness.oracle.patterns.wording import of_ranks
from reference.dtypes import FORMATS, Format

#: Wrong elements of different values that must be representable.
_LEAST_VALUES = 3
#: Elements that surely show the grid of the data; of fewer, the grid may look so many times coarser than it is.
_LEAST_ELEMENTS, _COARSER = 8, 256


def low_precision(evidence: Evidence) -> str | None:
    """Every element is representable in a lower precision, and off by no more than its rounding explains: half a unit
    in the last place for the result and, where micro-batches are added up in it, half a unit for each of them. Their
    running totals may be larger than the result: their units are those of the largest value."""
    own = format_named(evidence.dtype)
    lower = [fmt for fmt in FORMATS.values() if fmt.precision < own.precision]
    for fmt in sorted(lower, key=lambda f: f.precision):
        if _explains(evidence, fmt) and _told_by(evidence, fmt, own):
            name = str(fmt.torch_dtype).removeprefix("torch.")
            pairs = [(evidence.got[rank], evidence.wants[rank]) for rank in evidence.wrong_ranks]
            once = all(not different(got, rounded(want, fmt)).any() for got, want in pairs)
            what = f"is what is due, rounded to {name}" if once else f"holds only values of {name}, off by its rounding"
            return f"{of_ranks(evidence, evidence.wrong_ranks)} {what}: kept in a lower precision than {evidence.dtype}"
    return None


def _explains(evidence: Evidence, fmt: Format) -> bool:
    for rank in evidence.wrong_ranks:
        got, want = evidence.got[rank], evidence.wants[rank]
        if different(rounded(got, fmt), got).any():
            return False
        room = ulp(want, fmt)
        if evidence.micro_batches > 1:
            finite = np.where(np.isfinite(want), want, 0.0)
            room = (1 + evidence.micro_batches) / 2 * ulp(np.full(want.shape, np.abs(finite).max(initial=0.0)), fmt)
        if evidence.limits is not None:
            room = room + evidence.limits[rank]
        with np.errstate(invalid="ignore"):
            if (different(got, want) & ~(np.abs(got - want) <= room)).any():
                return False
    return bool(evidence.wrong_ranks)


def _told_by(evidence: Evidence, fmt: Format, own: Format) -> bool:
    """Whether a format with more bits would hardly give these values by chance."""
    got = np.concatenate([evidence.got[rank][evidence.wrong[rank]] for rank in evidence.wrong_ranks])
    got = np.unique(np.abs(got[np.isfinite(got) & (got != 0)]))
    if got.size < _LEAST_VALUES:
        return False
    step = np.maximum(ulp(got, own), grid(evidence.want) if evidence.limits is None else 0.0)
    bits = np.log2(np.maximum(ulp(got, fmt) / step, 1.0))
    return float(bits.sum()) >= evidence.margin + math.log2(len(FORMATS))


def rounding(evidence: Evidence) -> str | None:
    """Exact data, and errors of a unit or two in the last place, which no sum of such data gives: they are smaller than
    its grid."""
    if evidence.limits is not None or not evidence.wrong_ranks:
        return None
    own, most = format_named(evidence.dtype), 0.0
    step = grid(evidence.want) / (1 if evidence.want.size >= _LEAST_ELEMENTS else _COARSER)
    for rank in evidence.wrong_ranks:
        mask = evidence.wrong[rank]
        got, want = evidence.got[rank][mask], evidence.wants[rank][mask]
        error = np.abs(got - want)
        if not (error < step).all():
            return None
        most = max(most, float((error / ulp(np.maximum(np.abs(got), np.abs(want)), own)).max()))
    if most > 2:
        return None
    off = f"off by {'a unit' if most <= 1 else 'two units'} in the last place of {evidence.dtype}"
    who = of_ranks(evidence, evidence.wrong_ranks)
    return f"{who} is {off}: something is rounded on the way that one process computes exactly"
