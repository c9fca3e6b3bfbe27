"""What norms and gradients would be with each of the known mistakes of clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from harness.oracle.patterns.evidence import Suspect, Values
from reference.clip import ClipCase, ClipParameter, Tensors, measured


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
            yield f"only those of stage {stage} were counted: it is not reduced over pp", own


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
    right = min(1.0, limit / (norm + case.eps)) if norm else 1.0
    handed = np.array([1.0]) if name == "coefficient" else _handed(case, given, name)
    if right != 1:
        yield Suspect("is as if nothing were clipped", handed)
    elif norm:
        yield Suspect("is as if gradients within the limit were scaled up to it", handed * (limit / norm))
    if name != "coefficient" and case.scale:
        yield Suspect("is as if the loss scale were not divided out", handed * right * case.loss_scale)
        yield Suspect("is as if the loss scale were divided out twice", handed * right / case.loss_scale)
    for cause, found in _norms(case, given):
        other = min(1.0, limit / (found + case.eps)) if found else 1.0
        if other != right and other != 1:
            yield Suspect(f"is clipped as if {cause}", handed * other)


def _handed(case: ClipCase, given: Tensors, name: str) -> Values:
    i = int(name.removeprefix("gradient").removeprefix("copy"))
    found = given.get(f"gradient{i}", torch.zeros(case.parameters[i].size, dtype=torch.float64))
    values: Values = (found / case.loss_scale).numpy()
    return values
