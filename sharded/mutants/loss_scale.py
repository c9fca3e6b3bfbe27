"""Faults of the loss scaler: states that come back changed, counters that are not kept, limits that do not hold, and
ranks that do not agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from sharded import loss_scale
from sharded.loss_scale import DynamicLossScaler
from sharded.mutants import Mutant, Patch


def _moved_by_loading() -> list[Patch]:
    original = DynamicLossScaler._take

    def take(self: DynamicLossScaler, state: Mapping[str, Any]) -> None:
        """What loads makes a step on nothing first, to have its state allocated, and the step counts."""
        original(self, state)
        self._went_well()

    return [(DynamicLossScaler, "_take", take)]


def _without(name: str) -> list[Patch]:
    original = DynamicLossScaler._take

    def take(self: DynamicLossScaler, state: Mapping[str, Any]) -> None:
        fresh = {"good": 0, "left": self._hysteresis}
        original(self, {**state, name: fresh[name]})

    return [(DynamicLossScaler, "_take", take)]


def _tested_before_decremented() -> list[Patch]:
    def overflowed(self: DynamicLossScaler) -> None:
        self._good = 0
        exhausted = self._left == 0
        self._left = max(self._left - 1, 0)
        if exhausted or self._hysteresis == 1:
            self._back_off()

    return [(DynamicLossScaler, "_overflowed", overflowed)]


def _good_not_reset() -> list[Patch]:
    original = DynamicLossScaler._overflowed

    def overflowed(self: DynamicLossScaler) -> None:
        good = self._good
        original(self)
        self._good = good

    return [(DynamicLossScaler, "_overflowed", overflowed)]


def _no_minimum() -> list[Patch]:
    def back_off(self: DynamicLossScaler) -> None:
        self.scale *= self._backoff_factor

    return [(DynamicLossScaler, "_back_off", back_off)]


def _one_step_late() -> list[Patch]:
    return [(DynamicLossScaler, "_is_due", lambda self: self._good > self._interval)]


def _agreed_over_the_first_group() -> list[Patch]:
    original = loss_scale.agreed

    def agreed(found: bool, groups: Sequence[ProcessGroup], device: torch.device | str = "cpu") -> bool:
        return original(found, groups[:1], device)

    return [(loss_scale, "agreed", agreed)]


def _only_infinities() -> list[Patch]:
    def has_overflow(gradients: Iterable[torch.Tensor | None]) -> bool:
        return any(bool(torch.isinf(g).any()) for g in gradients if g is not None)

    return [(loss_scale, "has_overflow", has_overflow)]


def _hysteresis_kept_by_growth() -> list[Patch]:
    original = DynamicLossScaler._grow

    def grow(self: DynamicLossScaler) -> None:
        left = self._left
        original(self)
        self._left = left

    return [(DynamicLossScaler, "_grow", grow)]


MUTANTS = (
    Mutant(
        "F27",
        "loss_scale",
        "loading runs a dummy step that moves the restored scale",
        "huggingface/accelerate#4289",
        _moved_by_loading,
    ),
    Mutant(
        "F28",
        "loss_scale",
        "the growth counter is not saved",
        "huggingface/transformers#34053",
        lambda: _without("good"),
    ),
    Mutant(
        "F28b",
        "loss_scale",
        "the hysteresis counter is not saved",
        "huggingface/transformers#34053",
        lambda: _without("left"),
    ),
    Mutant(
        "F29a",
        "loss_scale",
        "hysteresis is tested before it is decremented",
        "deepspeedai/DeepSpeed#138",
        _tested_before_decremented,
    ),
    Mutant(
        "F29b",
        "loss_scale",
        "an overflow does not reset the growth counter",
        "deepspeedai/DeepSpeed#138",
        _good_not_reset,
    ),
    Mutant("F29c", "loss_scale", "the minimum is ignored", "deepspeedai/DeepSpeed#138", _no_minimum),
    Mutant("F29d", "loss_scale", "the scale grows a step late", "deepspeedai/DeepSpeed#138", _one_step_late),
    Mutant("F29e", "loss_scale", "ranks agree over the first group only", "own", _agreed_over_the_first_group),
    Mutant("F29f", "loss_scale", "gradients are searched for infinities, and not for NaN", "own", _only_infinities),
    Mutant("F29g", "loss_scale", "growth does not replenish the hysteresis", "own", _hysteresis_kept_by_growth),
)
