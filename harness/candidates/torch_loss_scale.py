"""torch.amp.GradScaler on the CPU, as the candidate ``torch`` offers it. It has no hysteresis and no minimum, leaves it
to others to agree about an overflow, and looks neither at its initial scale and interval nor at what a state is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from harness.loss_scale import LossScaler
from reference.loss_scale import LossScaleCase, expected

LOSS_SCALE_FEATURES = (
    "loss_scale_ceiling",
    "loss_scale_load",
    "loss_scale_interval",
)


class _Steps(torch.optim.SGD):
    """Counts the steps that are not skipped."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1


def grad_scaler(case: LossScaleCase, known_fault: Callable[[str], None]) -> LossScaler:
    """A GradScaler, with an optimizer to be called or skipped."""
    if interval_is_passed(case):
        known_fault("GradScaler whose interval is set to fewer than the good steps so far: it grows no more")
    asked = case.asked
    scaler: Any = torch.amp.GradScaler(
        "cpu",
        init_scale=asked.initial,
        growth_factor=asked.growth_factor,
        backoff_factor=asked.backoff_factor,
        growth_interval=asked.growth_interval,
    )
    scaler.scale(torch.ones(1))  # which makes its tensors
    skipped = False

    def check(gradients: Sequence[torch.Tensor]) -> bool:
        nonlocal skipped
        parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()  # as it comes of the scaled loss
        optimizer = _Steps(parameters, lr=1.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        skipped = optimizer.count == 0
        return skipped

    def update(found_inf: bool) -> bool:
        scaler.update()
        return skipped

    def counters() -> Mapping[str, int]:
        return {"good": scaler.state_dict()["_growth_tracker"]}

    return LossScaler(
        scaler.get_scale,
        update,
        check=check,
        counters=counters,
        state=scaler.state_dict,
        load=scaler.load_state_dict,
        set_interval=scaler.set_growth_interval,
    )


def interval_is_passed(case: LossScaleCase) -> bool:
    """Whether the interval is ever set to no more than the good steps that were made already."""
    return any(
        event.what == "interval" and event.interval <= step.state.good
        for event, step in zip(case.events, expected(case), strict=True)
    )
