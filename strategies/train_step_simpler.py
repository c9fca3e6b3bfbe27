"""Proposes simpler training steps of a GPT, for the last step of shrinking."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import strategies.gpt
from reference.gpt import GptCase
from reference.loss_scale import Scaling
from reference.mesh import Mesh
from reference.mixed_precision import UNSCALED
from reference.mixed_precision_parts import Overflow
from reference.train_step import TrainStepCase
from strategies.gpt import LEAST_NORMED
from strategies.mesh import smaller_meshes
from strategies.scope import Scope
from strategies.simpler import Simpler
from strategies.train_step import of_model, within


def simpler(case: TrainStepCase, scope: Scope) -> Iterator[TrainStepCase]:
    """The smallest meshes with a small model, then plain options, fewer steps, and simpler models."""
    changed = _SIMPLER.changed
    smaller = [(mesh, _small(case.model, mesh)) for mesh in _meshes(case.mesh)]
    for size in range(max((len(models) for _, models in smaller), default=0)):
        for mesh, models in smaller:
            if size >= len(models):
                continue
            fitted = _on(case, models[size])
            yield from changed(case, scope, **fitted)
            if case.overflows and mesh.names:
                step = case.overflows[0].step
                yield from changed(case, scope, **fitted | {"overflows": (Overflow(step, axes=mesh.names),)})
    options = _SIMPLER.options(case)
    yield from changed(case, scope, **options)
    for name in options:
        yield from changed(case, scope, **{other: value for other, value in options.items() if other != name})
    for steps in range(1, case.steps):
        overflows = tuple(one for one in case.overflows if one.step < steps)
        for load in sorted({min(case.load, steps - 1), 0}):
            resume = case.resume if load else "same"
            kept = {"overflows": overflows, "load": load, "resume": resume, "relaunch": case.relaunch and load > 0}
            yield from changed(case, scope, steps=steps, **kept)
    for name, plain in options.items():
        yield from changed(case, scope, **{name: plain})
    yield from changed(case, scope, load=min(1, case.load))
    for scaling in (_SCALED, _MOVING):
        yield from changed(case, scope, scaling=scaling)
    for i, one in enumerate(case.overflows):
        rest = case.overflows[:i], case.overflows[i + 1 :]
        yield from changed(case, scope, overflows=rest[0] + rest[1])
        for milder in _milder(one):
            yield from changed(case, scope, overflows=(*rest[0], milder, *rest[1]))
    for model in strategies.gpt.simpler(case.model, of_model(scope)):
        yield from changed(case, scope, **_on(case, model))


def _meshes(mesh: Mesh) -> Iterator[Mesh]:
    """Smaller ones, from two ranks up, without axes of one rank; then one rank. A trainer has faults of several ranks,
    and each try costs all its steps."""
    found = [one for one in smaller_meshes(mesh) if all(size > 1 for _, size in one.axes)]
    yield from sorted(found, key=lambda one: (one.size == 1, one.size))


def _small(model: GptCase, mesh: Mesh) -> list[GptCase]:
    """Plain and tiny, then tiny, then as it is; fewer where that is none."""
    plain: dict[str, Any] = {"recompute": "none", "positions": "none", "qk_norm": False, "bias": False}
    tiny = [one for one in strategies.gpt.small(model, mesh) if one.get("hidden", LEAST_NORMED) >= LEAST_NORMED][:3]
    model = model if mesh.axis_size("tp") > 1 else replace(model, sequence_parallel=False)
    found = []
    for changes in ({**tiny[0], **plain}, *tiny, {}):
        try:
            found.append(replace(model, mesh=mesh, **changes))
        except ValueError:
            continue
    return found


def _on(case: TrainStepCase, model: GptCase) -> dict[str, Any]:
    mesh, overflows = model.mesh, []
    for one in case.overflows:
        axes = tuple(name for name in one.axes if name in mesh.names)
        overflows.append(replace(one, axes=axes, at=one.at % mesh.axis_size(axes) if axes else 0))
    resume = case.resume if mesh.axis_size("dp") > 1 else "same"
    sharded = case.sharded and mesh.axis_size("dp") > 1
    return {"model": model, "overflows": tuple(overflows), "resume": resume, "sharded": sharded}


def _milder(one: Overflow) -> Iterator[Overflow]:
    yield replace(one, value="inf", parameter=0, element=0)
    lower: list[dict[str, Any]] = [{name: 0} for name in ("step", "at", "parameter", "element")]
    for change in lower:
        yield replace(one, **change)
    if len(one.axes) > 1:
        yield from (replace(one, axes=(axis,), at=min(one.at, 1)) for axis in one.axes)


_SCALED = Scaling("constant", 2.0**8)
#: A scale that one overflow moves, and no good step.
_MOVING = Scaling(initial=2.0**10, growth_interval=3)


def _measure(case: TrainStepCase) -> tuple[Any, ...]:
    """What is simpler has the smaller measure."""
    overflows = [
        (len(one.axes), one.value != "inf", one.step, one.at, one.parameter, one.element) for one in case.overflows
    ]
    scaling = case.scaling != UNSCALED, case.scaling.kind == "dynamic", case.scaling != _MOVING, case.scaling != _SCALED
    size, *model = strategies.gpt.measure(case.model)
    return (size, case.steps, len(_SIMPLER.options(case)), len(overflows), *model, scaling, overflows, case.load)


_SIMPLER = Simpler(TrainStepCase, ("steps",), _measure, within)
