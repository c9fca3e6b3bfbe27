"""What norms and gradients would be with each of the known mistakes of clipping."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from harness.oracle.patterns.evidence import Suspect, Values
from reference.clip import ClipCase, ClipParameter, Tensors, measured
from reference.layout import window


def suspects(case: ClipCase, given: Tensors, name: str) -> list[Suspect]:
    """The wrong values that known mistakes give for ``norm``, ``coefficient``, or a gradient."""
    if not math.isfinite(measured(case)[0]):
        return []
    return list(_of_norm(case, given) if name == "norm" else _of_others(case, given, name))


def _of_norm(case: ClipCase, given: Tensors) -> Iterator[Suspect]:
    norm, _ = measured(case)
    for cause, found in _norms(case, given):
        if found != norm:
            yield Suspect(f"is as if {cause}", np.array([found]))
    for cause, own in _not_reduced(case, given):
        # Both are sums in float64, of other orders: what differs by less is the right norm again, and no suspect.
        if not all(math.isclose(found, norm) for found in own):
            yield Suspect(f"is as if {cause}", tuple(np.array([found]) for found in own))


def _norms(case: ClipCase, given: Tensors) -> Iterator[tuple[str, float]]:
    """What each mistake gives for the norm."""
    size = case.mesh.axis_size
    yield "the loss scale were not divided out", measured(case)[0] * case.loss_scale
    yield "the loss scale were divided out twice", measured(case)[0] / case.loss_scale
    if case.norm_type == "inf":
        yield "the norm were always 1", 1.0
        return
    yield "parameters that all tp ranks hold were counted on each", _counted(case, given, lambda one, n: n * (
        1 if one.split else size("tp")))  # fmt: skip
    yield "parameters that all dp ranks hold were counted on each", _counted(case, given, lambda one, n: n * (
        1 if one.sharded else size("dp")))  # fmt: skip
    if size("pp") > 1:
        tied = [len(case.stages(i)) for i in range(len(case.parameters))]
        both = {id(one): count for one, count in zip(case.parameters, tied, strict=True)}
        yield "both copies of a tied parameter were counted", _counted(case, given, lambda one, n: n * both[id(one)])
        stages = [case.stages(i)[0] for i in range(len(case.parameters))]
        at = {id(one): stage for one, stage in zip(case.parameters, stages, strict=True)}
        for stage in range(size("pp")):
            own = _counted(case, given, lambda one, n, s=stage: float(at[id(one)] == s))  # type: ignore[misc]
            yield f"only those of stage {stage} were counted", own


def _not_reduced(case: ClipCase, given: Tensors) -> Iterator[tuple[str, list[float]]]:
    """The norms of the ranks where it is not reduced over one axis or several."""
    axes = [axis for axis, size in case.mesh.axes if size > 1]
    for count in range(1, len(axes) + 1):
        for some in itertools.combinations(axes, count):
            alone = ": each rank counts its own part alone" if len(some) == len(axes) else ""
            # What ranks hold alike is counted by the first of them, or, where a rank's norm is its own, by each.
            for by_each in (False, True):
                own = [_norm_at(case, given, rank, some, by_each) for rank in range(case.mesh.size)]
                yield f"it were not reduced over {' and '.join(some)}{alone}", own


def _norm_at(case: ClipCase, given: Tensors, rank: int, axes: tuple[str, ...], by_each: bool) -> float:
    """Of the elements that the ranks hold whose coordinates along ``axes`` are those of a rank."""
    at = [case.mesh.coordinate(rank, axis) for axis in axes]
    ranks = [r for r in range(case.mesh.size) if [case.mesh.coordinate(r, axis) for axis in axes] == at]
    values = [torch.zeros(1, dtype=torch.float64)]
    for i, one in enumerate(case.parameters):
        cut = {"pp": True, "tp": one.split, "dp": one.sharded}
        counts = by_each or not any(place for axis, place in zip(axes, at, strict=True) if not cut[axis])
        if case.has_gradient(i) and counts:
            held = torch.zeros(one.size, dtype=torch.bool)
            for r in ranks:
                window((one.size,), case.layout(i, case.stages(i)[0]), case.mesh, r).take(held).fill_(True)
            values.append(given[f"gradient{i}"][held].abs() / 2.0**case.magnitude)
    flat = torch.cat(values)
    total = flat.max() if case.norm_type == "inf" else (flat**case.p).sum() ** (1 / case.p)
    return float(total) * 2.0 ** (case.magnitude - case.scale)


def _counted(case: ClipCase, given: Tensors, times: Callable[[ClipParameter, float], float]) -> float:
    """The norm where each parameter is counted so many times."""
    total = 0.0
    for i, one in enumerate(case.parameters):
        if case.has_gradient(i):
            values = (given[f"gradient{i}"] / 2.0**case.magnitude).abs()
            total += times(one, 1.0) * float((values**case.p).sum())
    found: float = total ** (1 / case.p) * 2.0 ** (case.magnitude - case.scale)
    return found


def _of_others(case: ClipCase, given: Tensors, name: str) -> Iterator[Suspect]:
    norm, limit = measured(case)
    right = _coefficient(case, norm)
    handed = np.array([1.0]) if name == "coefficient" else _handed(case, given, name)
    if right != 1:
        yield Suspect("is as if nothing were clipped", handed)
    elif norm:
        yield Suspect("is as if gradients within the limit were scaled up to it", handed * (limit / (norm + case.eps)))
    if name != "coefficient" and case.scale:
        yield Suspect("is as if the loss scale were not divided out", handed * right * case.loss_scale)
        yield Suspect("is as if the loss scale were divided out twice", handed * right / case.loss_scale)
    for cause, found in _norms(case, given):
        other = _coefficient(case, found)
        if other not in (right, 1):
            yield Suspect(f"is clipped as if {cause}", handed * other)
    for cause, norms in _not_reduced(case, given):
        others = [_coefficient(case, found) for found in norms]
        if set(others) != {1} and not all(math.isclose(other, right) for other in others):
            yield Suspect(f"is clipped as if {cause}", tuple(handed * other for other in others))


def _coefficient(case: ClipCase, norm: float) -> float:
    return min(1.0, measured(case)[1] / (norm + case.eps)) if norm else 1.0


def _handed(case: ClipCase, given: Tensors, name: str) -> Values:
    i = int(name.removeprefix("gradient").removeprefix("copy"))
    found = given.get(f"gradient{i}", torch.zeros(case.parameters[i].size, dtype=torch.float64))
    values: Values = (found / case.loss_scale).numpy()
    return values
