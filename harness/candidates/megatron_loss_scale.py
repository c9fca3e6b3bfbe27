"""Megatron-Core's grad scalers, as the candidate ``megatron-core`` offers them. Its optimizer makes the ranks agree,
and hands over one flag for all of them; states hold no configuration."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from harness.candidates.megatron_core_on_cpu import MadeOnTheCpu
from harness.loss_scale import LossScaler
from reference.loss_scale import LossScaleCase, Scaling

if importlib.util.find_spec("megatron") is not None:
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler

LOSS_SCALE_FEATURES = (
    "loss_scale_constant",
    "loss_scale_hysteresis",
    "loss_scale_minimum",
    "loss_scale_load",
    "loss_scale_refuses",
)
#: It wants a minimum; this one is never reached.
_NONE = 2.0**-100


def scaler_of(asked: Scaling) -> Any:
    """A ConstantGradScaler or a DynamicGradScaler."""
    with MadeOnTheCpu():
        if asked.kind == "constant":
            return ConstantGradScaler(asked.initial)
        return DynamicGradScaler(
            initial_scale=asked.initial,
            min_scale=asked.minimum or _NONE,
            growth_factor=asked.growth_factor,
            backoff_factor=asked.backoff_factor,
            growth_interval=asked.growth_interval,
            hysteresis=asked.hysteresis,
        )


def grad_scaler(case: LossScaleCase) -> LossScaler:
    """As a trainer uses it."""
    asked = case.asked
    made = scaler_of(asked)

    def update(found_inf: bool) -> bool:
        made.update(found_inf)
        return found_inf

    def counters() -> Mapping[str, int]:
        state = made.state_dict()
        return {"good": state["growth_tracker"], "left": max(0, state["hysteresis_tracker"])}

    def load(state: Any) -> None:
        with MadeOnTheCpu():
            made.load_state_dict(state)

    return LossScaler(
        lambda: made.scale,
        update,
        counters=counters if asked.kind == "dynamic" else None,
        state=made.state_dict,
        load=load,
    )
