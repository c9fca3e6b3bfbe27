"""A constant factor: the size of an axis, its inverse, a sign, or any other."""

from __future__ import annotations

import math

import numpy as np

from harness.oracle.patterns.evidence import Evidence, Values
from harness.oracle.patterns.fit import Explanation, allowances, fit
from harness.oracle.patterns.formats import grid
from harness.oracle.patterns.wording import called, of_ranks, on_ranks

#: Different magnitudes that a factor which has no name must explain.
_LEAST_MAGNITUDES = 3


def named_factor(evidence: Evidence) -> str | None:
    """A factor that a size of the case explains, or -1."""
    sizes = sorted(set(evidence.sizes.values()))
    factors = [-1.0, *map(float, sizes), *(1 / size for size in sizes)]
    fitting = {}
    for factor in factors:
        found = fit(evidence, scaled(evidence, factor))
        if found is not None and found.sure(evidence, len(factors)):
            fitting[factor] = found
    if len(fitting) != 1:
        return None
    ((factor, found),) = fitting.items()
    where = on_ranks(evidence, found.ranks)
    if factor == -1:
        return f"every element of {evidence.name} has the wrong sign{where}"
    if factor > 1:
        name = called(evidence, factor)
        return (
            f"every element of {evidence.name} is {factor:g} times too large{where}: {name}, as when summed where one "
            "copy is due"
        )
    size = round(1 / factor)
    return (
        f"every element of {evidence.name} is 1/{size} of what it should be{where}: 1 over {called(evidence, size)}, "
        "as when averaged where a sum is due"
    )


def any_factor(evidence: Evidence) -> str | None:
    """A factor that has no name: only the fact."""
    got, want = _in_units_of_tolerance(evidence)
    if np.unique(np.abs(want)).size < _LEAST_MAGNITUDES:
        return None
    if evidence.limits is None:  # every ratio is the factor, so take the one with the least rounding
        at = int(np.argmax(np.abs(want)))
        factor = float(got[at] / want[at])
    else:
        factor = float((got @ want) / (want @ want))
    if not np.isfinite(factor) or factor in (0.0, 1.0):
        return None
    found = fit(evidence, scaled(evidence, factor))
    if found is None or not found.sure(evidence, fitted=1):
        return None
    return f"every element of {evidence.name} is {factor:.6g} times what it should be{on_ranks(evidence, found.ranks)}"


def slight_factor(evidence: Evidence) -> str | None:
    """A factor so near 1 that no element is out of its tolerance: elements that were each off by twice of it, but not
    together, would lean less."""
    if evidence.wrong_ranks or evidence.limits is None:
        return None
    got, want = _in_units_of_tolerance(evidence)
    scale = float(want @ want)
    lean = float(want @ (got - want))
    if not 0 < scale < math.inf or not abs(lean) > 2 * math.sqrt(scale):
        return None
    everyone = tuple(range(evidence.mesh.size))
    return (
        f"{of_ranks(evidence, everyone)} is {1 + lean / scale:.6g} times what it should be, each element within its "
        "tolerance but all of them leaning one way"
    )


def scaled(evidence: Evidence, factor: float) -> Explanation:
    """Every rank holds ``factor`` times what it should; rounding grows with it."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = tuple(factor * want for want in evidence.wants)
    if evidence.limits is None:
        return Explanation(values, allowances(evidence, values))
    return Explanation(values, tuple(max(1.0, abs(factor)) * limit for limit in evidence.limits))


def _in_units_of_tolerance(evidence: Evidence) -> tuple[Values, Values]:
    """got and want of the elements of the wrong ranks (of all, where none is wrong) that are finite and not zero, those
    of equal replicas once."""
    found: list[tuple[Values, Values]] = []
    seen: set[tuple[object, bytes]] = set()
    for rank in evidence.wrong_ranks or range(evidence.mesh.size):
        got, want, part = evidence.got[rank], evidence.wants[rank], evidence.windows[rank]
        key = ((part.lead, part.ranges), got.tobytes())
        if key in seen:
            continue
        seen.add(key)
        limit = np.ones(want.shape) if evidence.limits is None else evidence.limits[rank]
        use = np.isfinite(got) & np.isfinite(want) & (want != 0) & np.isfinite(limit) & (limit > 0)
        found.append((got[use] / limit[use], want[use] / limit[use]))
    got, want = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return got, want


def is_multiple(values: Values, of: Values) -> bool:
    """Whether one array is a constant times the other, within a millionth of the largest value."""
    scale = float(np.max(np.abs(of), initial=0.0))
    if not scale or not np.isfinite(scale) or not np.isfinite(values).all():
        return False
    factor = float((values / scale).ravel() @ (of / scale).ravel()) / float(np.square(of / scale).sum())
    return bool(np.max(np.abs(values - factor * of), initial=0.0) <= 1e-6 * max(scale, grid(of)))
