"""Faults of trainers: who agrees about a step, what its norm counts, what the loss is multiplied by, and what is left
of the step before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sharded import main_parameters, train_step
from sharded.clip import Held, clip_gradients
from sharded.gpt_parallel import ParallelGPT
from sharded.loss_scale import agreed
from sharded.mixed_precision import MixedPrecisionOptimizer
from sharded.mutants import Mutant, Patch
from sharded.pipeline_tied import TiedParameters
from sharded.transformer import finish_gradients


def _over(*axes: str) -> Callable[[], list[Patch]]:
    """Ranks agree along these axes only."""

    def _agreed(self: MixedPrecisionOptimizer, found: bool) -> bool:
        return agreed(found, [group for axis, group in self._axes.items() if axis in axes], self._device)

    return lambda: [(MixedPrecisionOptimizer, "_agreed", _agreed)]


def _norm_over(*axes: str) -> Callable[[], list[Patch]]:
    def _clip(self: MixedPrecisionOptimizer, held: Sequence[Held]) -> tuple[float | None, float | None]:
        if self._limit is None:
            return None, None
        groups = {axis: group for axis, group in self._axes.items() if axis in axes}
        done = clip_gradients(held, self._limit, groups=groups, eps=self._eps)
        return done.norm, done.coefficient

    return lambda: [(MixedPrecisionOptimizer, "_clip", _clip)]


def _tied_counted_twice() -> list[Patch]:
    return [(train_step.Trainer, "_is_tied_copy", lambda self, name: False)]


def _shared_heads_counted_by_all() -> list[Patch]:
    return [(train_step.Trainer, "_is_shared_copy", lambda self, parameter: False)]


def _replicated_counted_by_all() -> list[Patch]:
    """Each tensor-parallel rank counts what all of them hold."""
    original = train_step.Trainer._place

    def _place(self: train_step.Trainer, name: str, parameter: nn.Parameter) -> Held:
        held = original(self, name, parameter)
        return Held(held.parameter, {"dp": self.model.data}, held.copy)

    return [(train_step.Trainer, "_place", _place)]


def _loss_multiplied(by: Callable[[train_step.Trainer], float]) -> Callable[[], list[Patch]]:
    return lambda: [(train_step.Trainer, "_loss_scale", by)]


def _not_unscaled() -> list[Patch]:
    return [(MixedPrecisionOptimizer, "_unscale", lambda self, held: None)]


def _not_zeroed() -> list[Patch]:
    return [(train_step.Trainer, "_zero_gradients", lambda self: None)]


def _steps_alone() -> list[Patch]:
    """The ranks that do not see the overflow step; the scale moves everywhere."""

    def _is_to_be_skipped(self: MixedPrecisionOptimizer, held: Sequence[Held]) -> bool:
        own = not all(bool(one.parameter.grad.isfinite().all()) for one in held if one.parameter.grad is not None)
        self.scaler.update(self._agreed(own))
        return own

    return [(MixedPrecisionOptimizer, "_is_to_be_skipped", _is_to_be_skipped)]


def _schedule_moves_on_skips() -> list[Patch]:
    original = MixedPrecisionOptimizer._update

    def _update(self: MixedPrecisionOptimizer) -> None:
        schedule, skipped = self._schedule, getattr(self, "skips", 0)
        self._schedule = lambda t: schedule(t + skipped)
        original(self)
        self._schedule = schedule

    skip = MixedPrecisionOptimizer._is_to_be_skipped

    def _is_to_be_skipped(self: MixedPrecisionOptimizer, held: Sequence[Held]) -> bool:
        skipped = skip(self, held)
        self.skips = getattr(self, "skips", 0) + skipped  # type: ignore[attr-defined]
        return skipped

    return [
        (MixedPrecisionOptimizer, "_update", _update),
        (MixedPrecisionOptimizer, "_is_to_be_skipped", _is_to_be_skipped),
    ]


def _reduced_before_the_tied_sum() -> list[Patch]:
    """What the optimizer reduces is what each stage has before their sum, which comes too late for it."""
    finish, own_gradient = TiedParameters.finish, main_parameters.own_gradient

    def finish_late(self: TiedParameters) -> None:
        for found in self._copies.values():
            for _, parameter in found:
                parameter.early = own_gradient(parameter).clone()  # type: ignore[attr-defined]
        finish(self)

    def early_gradient(p: torch.Tensor) -> torch.Tensor:
        return getattr(p, "early", own_gradient(p))

    return [(TiedParameters, "finish", finish_late), (main_parameters, "own_gradient", early_gradient)]


def _partial_gradients_left() -> list[Patch]:
    def _complete(self: ParallelGPT) -> None:
        """Of the first stage of each rank alone."""
        finish_gradients(self.stages[0], self.tensor)

    return [(ParallelGPT, "_complete", _complete)]


def _resumed_without_moments() -> list[Patch]:
    original = train_step.Trainer.load

    @torch.no_grad()
    def load(self: train_step.Trainer, saved: Mapping[str, Any]) -> None:
        original(self, saved)
        state = self.optimizer.save()
        for group in state["groups"]:
            for kept in group["parameters"].values():
                for kind in kept:
                    if kind != "master":
                        kept[kind].zero_()
        self.optimizer.load(state)

    return [(train_step.Trainer, "load", load)]


def _resumed_with_old_weights() -> list[Patch]:
    """The optimizer's state is loaded, and the model's weights are not."""

    def load(self: train_step.Trainer, saved: Mapping[str, Any]) -> None:
        self.optimizer.load(saved["optimizer"])

    return [(train_step.Trainer, "load", load)]


def _masks_from_the_start() -> list[Patch]:
    return [(ParallelGPT, "load_random_states", lambda self, states: None)]


def _count_in_the_module() -> list[Patch]:
    """As of a framework with a global count of steps: who goes on in the same process finds it there."""
    save, load = MixedPrecisionOptimizer.save, MixedPrecisionOptimizer.load
    steps = {"so far": 0}

    def save_without(self: MixedPrecisionOptimizer) -> dict[str, Any]:
        steps["so far"] = self.steps
        return {**save(self), "steps": 0}

    def load_with(self: MixedPrecisionOptimizer, saved: Mapping[str, Any]) -> None:
        load(self, {**saved, "steps": steps["so far"]})

    return [(MixedPrecisionOptimizer, "save", save_without), (MixedPrecisionOptimizer, "load", load_with)]


def _mutant(number: str, fault: str, patches: Callable[[], list[Patch]], thread: str = "own") -> Mutant:
    return Mutant(number, "train_step", fault, thread, patches)


MUTANTS = (
    _mutant(
        "F25d", "overflow is agreed over tp and dp, not over pp: one stage skips", _over("tp", "dp"),
        "deepspeedai/DeepSpeed#994",
    ),
    _mutant(
        "F26c", "the learning-rate schedule of the trainer advances on a skipped step", _schedule_moves_on_skips,
        "huggingface/accelerate#4242",
    ),
    _mutant(
        "F32b", "parameters that tensor-parallel ranks hold alike count in the norm on each",
        _replicated_counted_by_all,
        "NVIDIA-NeMo/RL#3788",
    ),
    _mutant("F33b", "the trainer's norm is not reduced over pp", _norm_over("tp", "dp"), "pytorch/torchtitan#649"),
    _mutant("F38c", "the tied embedding counts in the trainer's norm on both stages", _tied_counted_twice),
    _mutant(
        "F46c", "gradients are reduced over dp before the copies of the tied embedding are summed",
        _reduced_before_the_tied_sum, "NVIDIA/Megatron-LM#844",
    ),
    _mutant(
        "F82", "the loss is multiplied by the scale twice",
        _loss_multiplied(lambda self: self.scaler.scale**2 * self.model.data.size()),
    ),
    _mutant(
        "F83", "the loss is not multiplied by the scale", _loss_multiplied(lambda self: float(self.model.data.size()))
    ),
    _mutant("F84", "gradients are not divided by the scale", _not_unscaled),
    _mutant(
        "F85", "the mean over dp is taken of shares that add up to the loss",
        _loss_multiplied(lambda self: self.scaler.scale),
    ),
    _mutant("F86", "gradients are not set to zero between steps", _not_zeroed),
    _mutant("F87", "ranks that see no overflow step although others skip", _steps_alone),
    _mutant("F88", "a trainer goes on without the moments that were saved", _resumed_without_moments),
    _mutant("F89", "a trainer loads the optimizer, and not the weights", _resumed_with_old_weights),
    _mutant(
        "F90", "partial gradients of a rank's second stage are not summed over tp", _partial_gradients_left,
    ),
    _mutant(
        "F91", "key-value heads that several ranks hold count in the norm on each", _shared_heads_counted_by_all,
    ),
    _mutant("F95", "a trainer that goes on draws its dropout masks from the start", _masks_from_the_start),
    _mutant("F96", "the count of steps is the process's own, and not in the state", _count_in_the_module),
)  # fmt: skip
