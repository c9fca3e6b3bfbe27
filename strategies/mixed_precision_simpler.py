"""Proposes simpler cases of mixed-precision optimizers, for the last step of shrinking."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from reference.loss_scale import Scaling
from reference.mesh import Mesh
from reference.mixed_precision import UNSCALED, MixedPrecisionCase
from reference.mixed_precision_parts import Group, MixedParameter, Overflow
from strategies.mesh import smaller_meshes
from strategies.mixed_precision import within
from strategies.scope import Scope
from strategies.simpler import Simpler

_SCALED = Scaling("constant", 2.0**8)
#: A scale that one overflow moves, and no good step.
_MOVING = Scaling(initial=2.0**10, growth_interval=3)


def simpler(case: MixedPrecisionCase, scope: Scope) -> Iterator[MixedPrecisionCase]:
    """The smallest meshes with few parameters, then fewer steps and options, then one thing at a time."""
    changed = _SIMPLER.changed
    many = case.parameters
    for mesh in [*smaller_meshes(case.mesh), case.mesh]:
        changes = _on(case, mesh)
        for kept in (*((one,) for one in many), many):
            yield from changed(case, scope, **changes, parameters=kept)
        # A scale that makes this data overflow may not do so with that of a smaller mesh.
        for axes in [(name,) for name in mesh.names if mesh.axis_size(name) > 1]:
            plain = {"overflows": (Overflow(axes=axes),), "scaling": UNSCALED}
            yield from changed(case, scope, **changes | plain, parameters=many[:1])
            once = {"clip": 0.0, "steps": 1, "load": 0, "reload": 0, "relaunch": False}
            yield from changed(case, scope, **changes | plain | once, parameters=many[:1])
    options = _SIMPLER.options(case)
    for few in itertools.chain([()], ((name,) for name in options), itertools.combinations(options, 2)):
        plain = {name: value for name, value in options.items() if name not in few}
        yield from changed(case, scope, **plain)
    for steps in range(1, case.steps):
        yield from changed(case, scope, **_in(case, steps))
        for kept in ((one,) for one in many):
            yield from changed(case, scope, **_in(case, steps), parameters=kept)
    yield from _SIMPLER.plainer(case, scope)
    for scaling in (_SCALED, _MOVING):
        yield from changed(case, scope, scaling=scaling)
    for group in case.groups:
        yield from changed(case, scope, groups=(group,))
    yield from changed(case, scope, groups=tuple(Group(one.lr) for one in case.groups))
    for name in ("load", "reload"):
        yield from changed(case, scope, **{name: min(1, getattr(case, name))})
    yield from _fewer(case, scope)


def _fewer(case: MixedPrecisionCase, scope: Scope) -> Iterator[MixedPrecisionCase]:
    """One parameter or overflow less, or plainer."""
    changed = _SIMPLER.changed
    for i, parameter in enumerate(case.parameters):
        others = case.parameters[:i], case.parameters[i + 1 :]
        yield from changed(case, scope, parameters=others[0] + others[1])
        for plainer in _plainer(parameter):
            yield from changed(case, scope, parameters=(*others[0], plainer, *others[1]))
    for i, overflow in enumerate(case.overflows):
        rest = case.overflows[:i], case.overflows[i + 1 :]
        yield from changed(case, scope, overflows=rest[0] + rest[1])
        for other in _milder(overflow):
            yield from changed(case, scope, overflows=(*rest[0], other, *rest[1]))


def _on(case: MixedPrecisionCase, mesh: Mesh) -> dict[str, Any]:
    overflows = []
    for one in case.overflows:
        axes = tuple(name for name in one.axes if name in mesh.names)
        overflows.append(replace(one, axes=axes, at=one.at % mesh.axis_size(axes) if axes else 0))
    return {"mesh": mesh, "overflows": tuple(overflows), "sharded": case.sharded and "dp" in mesh.names}


def _in(case: MixedPrecisionCase, steps: int) -> dict[str, Any]:
    """So many steps, the first ones."""
    kept = tuple(one for one in case.overflows if one.step < steps)
    return {
        "steps": steps,
        "overflows": kept,
        "load": _earlier(case.load, steps),
        "reload": _earlier(case.reload, steps),
        "relaunch": case.relaunch and steps > 1,
    }


def _earlier(at: int, steps: int) -> int:
    return min(at, steps - 1)


def _plainer(one: MixedParameter) -> Iterator[MixedParameter]:
    plain = MixedParameter()
    yield plain
    for size in (1, 2):
        yield replace(one, size=size)
    for name in ("kind", "split", "stage", "tied", "fp32", "group"):
        yield replace(one, **{name: getattr(plain, name)})


def _milder(one: Overflow) -> Iterator[Overflow]:
    yield replace(one, value="inf", parameter=0, element=0)
    lower: list[dict[str, Any]] = [{name: 0} for name in ("step", "at", "parameter", "element")]
    for change in lower:
        yield replace(one, **change)
    if len(one.axes) > 1:
        yield from (replace(one, axes=(axis,), at=min(one.at, 1)) for axis in one.axes)


def _measure(case: MixedPrecisionCase) -> tuple[Any, ...]:
    """What is simpler has the smaller measure."""
    extra = sum(one.split + one.tied + one.fp32 + (one.kind != "trained") for one in case.parameters)
    shapes = sorted((one.size, one.stage, one.group) for one in case.parameters)
    overflows = [
        (len(one.axes), one.value != "inf", one.step, one.at, one.parameter, one.element) for one in case.overflows
    ]
    options, made = _SIMPLER.options(case), len(_SIMPLER.recipes(case))
    scaling = case.scaling != UNSCALED, case.scaling.kind == "dynamic", case.scaling != _MOVING, case.scaling != _SCALED
    groups = len(case.groups), [(one.weight_decay > 0, one.lr not in (1.0, 0.0), one.lr) for one in case.groups]
    return (
        case.mesh.size, len(case.mesh.axes), len(case.parameters), case.steps, len(options), extra, len(overflows),
        scaling, overflows, groups, shapes, made, case.load, case.reload,
    )  # fmt: skip


_SIMPLER = Simpler(MixedPrecisionCase, ("parameters", "steps"), _measure, within)
