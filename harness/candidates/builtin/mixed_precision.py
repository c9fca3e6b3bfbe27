"""The mixed-precision optimizer, with the loss scalers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from harness.mixed_precision import MixedPrecision
from reference.loss_scale import Scaling
from reference.mixed_precision import MixedPrecisionCase
from reference.mixed_precision_steps import limit
from sharded import loss_scale, updates
from sharded.clip import Held
from sharded.main_parameters import ParameterGroup
from sharded.mixed_precision import MixedPrecisionOptimizer, Stepped
from sharded.process_groups import ProcessGroups


def mixed_precision(
    case: MixedPrecisionCase, parameters: Mapping[str, torch.nn.Parameter], groups: ProcessGroups
) -> MixedPrecision:
    axes = {axis: groups.group(axis) for axis in case.mesh.names}
    scaler = scaler_of(case.scaling)
    made = MixedPrecisionOptimizer(
        _groups(case, parameters, groups),
        scaler,
        groups.group("dp"),
        axes=axes,
        limit=limit(case) if case.clip else None,
        eps=case.clip_eps,
        schedule=case.factor,
        sharded=case.sharded,
    )
    done: list[Stepped] = []

    def step() -> bool:
        done[:] = [made.step()]
        return done[0].skipped

    def number(found: float | None) -> float:
        assert found is not None
        return found

    dynamic = isinstance(scaler, loss_scale.DynamicLossScaler)
    return MixedPrecision(
        step,
        lambda: scaler.scale,
        counters=(lambda: {name: scaler.state()[name] for name in ("good", "left")}) if dynamic else None,
        steps=lambda: made.steps,
        norm=lambda: number(done[0].norm),
        coefficient=lambda: number(done[0].coefficient),
        master=lambda name: made.state(name)["master"],
        state=lambda name, kind: made.state(name)[kind],
        owned=lambda name: [made.owned(name)],
        reload=made.refresh,
        save=made.save,
        load=made.load,
    )


def _groups(
    case: MixedPrecisionCase, parameters: Mapping[str, torch.nn.Parameter], groups: ProcessGroups
) -> list[ParameterGroup]:
    stage = groups.group("pp").rank()
    made = []
    for number, group in enumerate(case.asked_groups):
        held = {}
        for i in case.trained:
            parameter = parameters.get(f"parameter{i}")
            if parameter is not None and case.group_of(i) == number:
                over = ("dp",) if case.parameters[i].split else ("dp", "tp")
                alike = {axis: groups.group(axis) for axis in over}
                held[f"parameter{i}"] = Held(parameter, alike, copy=stage != case.stages(i)[0])
        if case.optimizer == "adamw":
            rule: updates.Rule = updates.AdamW(group.lr, case.betas, case.adam_eps, group.weight_decay)
        else:
            rule = updates.SGD(group.lr, case.momentum, group.weight_decay)
        made += [ParameterGroup(rule, some) for some in _apart(case, held)]
    return made


def _apart(case: MixedPrecisionCase, held: Mapping[str, Held]) -> list[dict[str, Held]]:
    """Each copy of a tied parameter by itself, and what all tensor-parallel ranks hold apart from what they cut: in one
    buffer the place of an element decides in which order its parts are added, and copies would drift apart."""
    apart: dict[object, dict[str, Held]] = {}
    for name, one in held.items():
        parameter = case.parameters[int(name.removeprefix("parameter"))]
        apart.setdefault(name if parameter.tied else parameter.split, {})[name] = one
    return list(apart.values()) or [{}]  # a group of which this rank holds nothing may still be wrong


def scaler_of(scaling: Scaling) -> loss_scale.ConstantLossScaler:
    if scaling.kind == "constant":
        return loss_scale.ConstantLossScaler(scaling.initial)
    return loss_scale.DynamicLossScaler(
        scaling.initial,
        growth_factor=scaling.growth_factor,
        growth_interval=scaling.growth_interval,
        backoff_factor=scaling.backoff_factor,
        hysteresis=scaling.hysteresis,
        replenish=scaling.replenish,
        minimum=scaling.minimum,
    )
