"""The trainer of a GPT."""

from __future__ import annotations

from typing import Any

import torch

from harness.candidates.builtin.gpt import layouts, model_of, own_name
from harness.candidates.builtin.mixed_precision import scaler_of
from harness.train_step import Trainer
from reference.train_step import TrainStepCase
from sharded import updates
from sharded.loss_scale import DynamicLossScaler
from sharded.mixed_precision import Stepped
from sharded.process_groups import ProcessGroups
from sharded.train_step import Trainer as ShardedTrainer


def train_step(case: TrainStepCase, groups: ProcessGroups) -> Trainer:
    model, scaler = model_of(case.model, groups, reduces=False), scaler_of(case.scaling)
    made = ShardedTrainer(
        model,
        _rule(case),
        scaler,
        limit=case.clip or None,
        eps=case.clip_eps,
        schedule=case.factor,
        sharded=case.sharded,
    )
    parameters = {own_name(name): parameter for name, parameter in model.named_parameters().items()}
    kept = {name: _first(made, parameter) for name, parameter in parameters.items()}
    owned = {name: [made.optimizer.owned(own)] for name, own in kept.items()}
    done: list[Stepped] = []
    states: dict[str, dict[str, torch.Tensor]] = {}

    def step(ids: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor) -> torch.Tensor | None:
        sizes = list(case.model.sizes)
        pairs = zip(torch.split(targets, sizes), torch.split(valid, sizes), strict=True)
        loss, stepped = made.step(torch.split(ids, sizes), list(pairs))
        done[:] = [stepped]
        states.clear()
        return loss

    def loaded() -> None:
        made.refresh()
        states.clear()

    def load(saved: Any) -> None:
        made.load(saved)
        states.clear()

    def state(name: str) -> dict[str, torch.Tensor]:
        """Which is asked for by name, and read at once."""
        if not states:
            states.update(made.optimizer.states())
        return states[kept[name]]

    def number(found: float | None) -> float:
        assert found is not None
        return found

    dynamic = isinstance(scaler, DynamicLossScaler)
    return Trainer(
        step,
        dict(parameters),
        layouts(case.model),
        lambda: scaler.scale,
        lambda: done[0].skipped,
        loaded=loaded,
        counters=(lambda: {name: scaler.state()[name] for name in ("good", "left")}) if dynamic else None,
        steps=lambda: made.optimizer.steps,
        norm=lambda: number(done[0].norm),
        coefficient=lambda: number(done[0].coefficient),
        master=lambda name: state(name)["master"],
        state=lambda name, kind: state(name)[kind],
        owned=lambda name: owned[name],
        save=made.save,
        load=load,
        before_forward=lambda hook: setattr(model, "before_forward", hook),
        after_backward=lambda hook: setattr(model, "after_backward", hook),
    )


def _first(made: ShardedTrainer, parameter: torch.Tensor) -> str:
    """The name under which the trainer keeps a parameter: an output that is the embedding itself has that of it."""
    return next(name for name, other in made.parameters.items() if other is parameter)


def _rule(case: TrainStepCase) -> updates.Rule:
    if case.optimizer == "adamw":
        return updates.AdamW(case.lr, case.betas, case.adam_eps, case.weight_decay)
    return updates.SGD(case.lr, case.momentum, case.weight_decay)
