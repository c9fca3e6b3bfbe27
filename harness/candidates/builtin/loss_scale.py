"""The loss scalers."""

from __future__ import annotations

from harness.loss_scale import LossScaler
from reference.loss_scale import LossScaleCase
from sharded import loss_scale as ours
from sharded.process_groups import ProcessGroups


def loss_scaler(case: LossScaleCase, groups: ProcessGroups) -> LossScaler:
    asked = case.asked
    over = [groups.group(axis) for axis in case.mesh.names] if case.agree else []
    if asked.kind == "constant":
        constant = ours.ConstantLossScaler(asked.initial, groups=over)
        return LossScaler(
            lambda: constant.scale,
            constant.update,
            check=lambda gradients: ours.has_overflow(gradients),
            state=constant.save,
            load=constant.load,
        )
    made = ours.DynamicLossScaler(
        asked.initial,
        growth_factor=asked.growth_factor,
        growth_interval=asked.growth_interval,
        backoff_factor=asked.backoff_factor,
        hysteresis=asked.hysteresis,
        replenish=asked.replenish,
        minimum=asked.minimum,
        groups=over,
    )
    return LossScaler(
        lambda: made.scale,
        made.update,
        check=lambda gradients: ours.has_overflow(gradients),
        counters=lambda: {name: made.state()[name] for name in ("good", "left")},
        state=made.save,
        load=made.load,
        set_interval=made.set_growth_interval,
    )
