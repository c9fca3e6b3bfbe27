"""Comparison within the computed tolerance: two statistics against their limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.observation import Observation
from harness.oracle.compare import described, held_values, must_be_absent
from harness.oracle.statistics import Expected, Part, Statistic, parts, ratios, slope, worst
from harness.verdict import Finding
from reference.layout import Layout, layout_in_words
from reference.mesh import Mesh


@dataclass(frozen=True)
class Limits:
    """Above these, a statistic is no rounding any more. See docs/oracle.md for the calibration that they come from."""

    worst: float = 16.0
    slope: float = 16.0


@dataclass(frozen=True)
class Judged:
    """What came of one tensor: its statistics, and the finding where one is above its limit."""

    finding: Finding | None = None
    worst: float = 0.0
    slope: float = 0.0
    ambiguous: int = 0


def compare_within(
    name: str,
    expected: Expected | None,
    layout: Layout,
    dtype: str,
    mesh: Mesh,
    observed: Sequence[Observation],
    limits: Limits = Limits(),
) -> Judged:
    """Judges tensor ``name``. expected: None where there must be no such tensor. layout, dtype, mesh and observed as in
    `harness.oracle.compare.compare_exact`."""
    if expected is None:
        return Judged(must_be_absent(name, mesh, observed))
    got = held_values(name, expected.want.shape, layout, dtype, mesh, observed)
    if isinstance(got, Finding):
        return Judged(got)
    found = parts(expected, layout, mesh, got)
    element, factor = worst(found), slope(found)
    finding = None
    if not element.value <= limits.worst:
        finding = _elements(name, expected, layout, mesh, found, limits)
    elif not factor.value <= limits.slope:
        finding = _factor(name, layout, mesh, found, factor, limits)
    return Judged(finding, element.value, factor.value, int(expected.ambiguous.sum()))


def _elements(
    name: str,
    expected: Expected,
    layout: Layout,
    mesh: Mesh,
    found: Sequence[Part],
    limits: Limits,
) -> Finding:
    masks = {part.rank: ~(ratios(part) <= limits.worst) for part in found}
    wrong = {rank: mask for rank, mask in masks.items() if mask.any()}
    first = described(name, expected.want, layout, mesh, [part.got for part in found], wrong)
    assert first.rank is not None
    assert first.local_index is not None
    allowed = limits.worst * float(found[first.rank].tolerance[first.local_index])
    return replace(first, tolerance=allowed)


def _factor(name: str, layout: Layout, mesh: Mesh, found: Sequence[Part], factor: Statistic, limits: Limits) -> Finding:
    """No element is out of its tolerance, but many lean the same way."""
    chosen = [part for part in found if factor.rank is None or part.rank == factor.rank]
    got, want = (np.concatenate([np.ravel(values) for values in arrays]) for arrays in _sloped(chosen))
    scale = float(np.abs(want).max(initial=0.0)) or 1.0
    lean = float(((got - want) / scale) @ (want / scale) / ((want / scale) @ (want / scale)))
    where = "all ranks together" if factor.rank is None else mesh.describe(factor.rank)
    return Finding(
        "mismatch",
        f"{name} is {1 + lean:.9g} times what one process computes on {where}: every element is within its tolerance, "
        f"but together they lean {_times(factor.value)} as far as rounding explains",
        factor.rank,
        None if factor.rank is None else mesh.describe(factor.rank),
        name,
        details=f"limit: {limits.slope:g} times\nlayout: {layout_in_words(layout)}",
    )


def _sloped(chosen: Sequence[Part]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return [part.got[part.sloped] for part in chosen], [part.want[part.sloped] for part in chosen]


def _times(value: float) -> str:
    return f"{value:.3g} times" if np.isfinite(value) else "beyond any multiple of"
