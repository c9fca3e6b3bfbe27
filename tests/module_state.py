"""Candidates that keep in their module what belongs into the state, and whose saving counts as a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from harness.candidates.builtin import Builtin
from harness.loss_scale import LossScaler
from harness.mixed_precision import MixedPrecision
from harness.sharded_optimizer import ShardedOptimizer
from reference.loss_scale import LossScaleCase
from reference.mixed_precision import MixedPrecisionCase
from reference.sharded_optimizer import ShardedOptimizerCase

STEPS = {"so far": 0}


class CountsInTheModule(Builtin):
    def sharded_optimizer(
        self, case: ShardedOptimizerCase, parameters: Mapping[str, torch.nn.Parameter]
    ) -> ShardedOptimizer:
        made = super().sharded_optimizer(case, parameters)
        save, load = made.save, made.load
        assert save is not None
        assert load is not None

        def without() -> dict[str, Any]:
            state = save()
            STEPS["so far"] = state["steps"]
            return {**state, "steps": 0}

        made.save = without
        made.load = lambda state: load({**state, "steps": STEPS["so far"]})
        return made

    def loss_scaler(self, case: LossScaleCase) -> LossScaler:
        made = super().loss_scaler(case)
        save, load = made.state, made.load
        assert save is not None
        assert load is not None

        def without() -> dict[str, Any]:
            saved = save()
            STEPS["so far"] = saved["state"]["good"]
            return {**saved, "state": {**saved["state"], "good": 0}}

        made.state = without
        made.load = lambda saved: load({**saved, "state": {**saved["state"], "good": STEPS["so far"]}})
        return made


class CountsUntold(CountsInTheModule):
    def loss_scaler(self, case: LossScaleCase) -> LossScaler:
        made = super().loss_scaler(case)
        made.counters = None
        return made


class SavingCounts(Builtin):
    def sharded_optimizer(
        self, case: ShardedOptimizerCase, parameters: Mapping[str, torch.nn.Parameter]
    ) -> ShardedOptimizer:
        made = super().sharded_optimizer(case, parameters)
        made.save = _counted(made.save, made.load)
        return made

    def mixed_precision(self, case: MixedPrecisionCase, parameters: Mapping[str, torch.nn.Parameter]) -> MixedPrecision:
        made = super().mixed_precision(case, parameters)
        made.save = _counted(made.save, made.load)
        return made


def _counted(
    save: Callable[[], Mapping[str, Any]] | None, load: Callable[[Any], object] | None
) -> Callable[[], Mapping[str, Any]]:
    assert save is not None
    assert load is not None

    def saved() -> Mapping[str, Any]:
        state = save()
        load({**state, "steps": state["steps"] + 1})
        return state

    return saved
