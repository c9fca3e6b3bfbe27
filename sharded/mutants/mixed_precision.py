"""Faults of mixed-precision optimizers: ranks that do not agree about a step, what moves although it is skipped, and
masters that are not those of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from sharded.clip import Held, clip_gradients, multiply
from sharded.loss_scale import agreed
from sharded.main_parameters import Replicated
from sharded.mixed_precision import MixedPrecisionOptimizer, Stepped
from sharded.mutants import Mutant, Patch
from sharded.sharded_optimizer import MASTER, Buffer, ShardedOptimizer

Optimizer = MixedPrecisionOptimizer


def _flag_read_too_early() -> list[Patch]:
    def _agreed(self: Optimizer, found: bool) -> bool:
        works: list[Any] = []
        for group in self._axes.values():
            if group.size() > 1:
                flag = torch.tensor([float(found)])
                works.append(dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group, async_op=True))
                found = bool(flag.item() > 0)
        for work in works:
            work.wait()
        return found

    return [(Optimizer, "_agreed", _agreed)]


def _agreed_over(*axes: str) -> Callable[[], list[Patch]]:
    def _agreed(self: Optimizer, found: bool) -> bool:
        return agreed(found, [group for axis, group in self._axes.items() if axis in axes], self._device)

    return lambda: [(Optimizer, "_agreed", _agreed)]


def _on_skip(then: Callable[[Optimizer, Sequence[Held]], None]) -> Callable[[], list[Patch]]:
    """Does something in a step that is skipped."""

    def patches() -> list[Patch]:
        original = Optimizer._is_to_be_skipped

        def _is_to_be_skipped(self: Optimizer, held: Sequence[Held]) -> bool:
            skipped = original(self, held)
            if skipped:
                then(self, held)
            return skipped

        return [(Optimizer, "_is_to_be_skipped", _is_to_be_skipped)]

    return patches


@torch.no_grad()
def _update_moments(self: Optimizer, held: Sequence[Held]) -> None:
    """By gradients of zero, and with a learning rate of 0."""
    for one in held:
        if one.parameter.grad is not None:
            one.parameter.grad.zero_()
    for rule, main in zip(self._rules, self._main, strict=True):
        main.apply(replace(rule, lr=0.0))


def _count(self: Optimizer, held: Sequence[Held]) -> None:
    """As the optimizer counts for the correction of moments."""
    for main in self._main:
        main._steps += 1  # type: ignore[attr-defined]


def _schedule_advances() -> list[Patch]:
    """The schedule has a count of its own."""
    original, advance = Optimizer._update, _on_skip(_advance)

    def _update(self: Optimizer) -> None:
        schedule, skipped = self._schedule, getattr(self, "skipped", 0)
        self._schedule = lambda t: schedule(t + skipped)
        original(self)
        self._schedule = schedule

    return [(Optimizer, "_update", _update), *advance()]


def _advance(self: Optimizer, held: Sequence[Held]) -> None:
    self.skipped = getattr(self, "skipped", 0) + 1  # type: ignore[attr-defined]


def _checked_after_the_step() -> list[Patch]:
    def step(self: Optimizer) -> Stepped:
        held = self._reduced()
        self._unscale(held)
        found = [one.parameter.grad.clone() for one in held if one.parameter.grad is not None]
        norm, coefficient = self._clip(held)
        self._update()
        parts = [replace(one, parameter=gradient) for one, gradient in zip(held, found, strict=True)]
        for part, gradient in zip(parts, found, strict=True):
            part.parameter.grad = gradient.clone()
        if self._is_to_be_skipped(parts):
            self.steps -= 1
            return Stepped(skipped=True)
        return Stepped(False, norm, coefficient)

    return [(Optimizer, "step", step)]


def _unscaled_twice() -> list[Patch]:
    def _unscale(self: Optimizer, held: Sequence[Held]) -> None:
        multiply(held, 1 / self.scaler.scale**2)

    return [(Optimizer, "_unscale", _unscale)]


def _norm_of_local_gradients() -> list[Patch]:
    def _clip(self: Optimizer, held: Sequence[Held]) -> tuple[float | None, float | None]:
        if self._limit is None:
            return None, None
        done = clip_gradients(held, self._limit, eps=self._eps)
        return done.norm, done.coefficient

    return [(Optimizer, "_clip", _clip)]


def _rate_of_the_first_group() -> list[Patch]:
    original = Optimizer._update

    def _update(self: Optimizer) -> None:
        self._rules = [replace(rule, lr=self._rules[0].lr) for rule in self._rules]
        original(self)

    return [(Optimizer, "_update", _update)]


def _not_refreshed() -> list[Patch]:
    return [(Optimizer, "refresh", lambda self: None)]


def _not_copied_back() -> list[Patch]:
    return [(Replicated, "_hand_out", lambda self: None)]


def _made_anew_after_each_step() -> list[Patch]:
    original = Optimizer._update

    def _update(self: Optimizer) -> None:
        original(self)
        self.refresh()

    return [(Optimizer, "_update", _update)]


def _masters_not_loaded() -> list[Patch]:
    original = Optimizer.load

    def load(self: Optimizer, saved: Mapping[str, Any]) -> None:
        original(self, saved)
        self.refresh()

    return [(Optimizer, "load", load)]


def _gathered_into_the_masters_only() -> list[Patch]:
    original = ShardedOptimizer._apply

    def _apply(self: ShardedOptimizer, buffer: Buffer, gradient: torch.Tensor) -> None:
        """The ranks that own nothing of a parameter keep the old one."""
        before = {name: p.detach().clone() for name, p in buffer.parameters.items()}
        original(self, buffer, gradient)
        for (name, p), (start, stop) in zip(
            buffer.parameters.items(), buffer.cut.owned(self.group.rank()), strict=True
        ):
            if start == stop and MASTER in buffer.state:
                p.detach().copy_(before[name])

    return [(ShardedOptimizer, "_apply", _apply)]


def _mutant(number: str, fault: str, patches: Callable[[], list[Patch]], thread: str = "own") -> Mutant:
    return Mutant(number, "mixed_precision", fault, thread, patches)


MUTANTS = (
    _mutant(
        "F24", "the overflow flag is read before its reduction has finished", _flag_read_too_early,
        "pytorch/pytorch#115710",
    ),
    _mutant(
        "F25", "overflow is agreed over dp only: one stage skips", _agreed_over("dp"), "deepspeedai/DeepSpeed#994"
    ),
    _mutant("F25b", "overflow is not agreed over dp, where the gradients are cut", _agreed_over("tp", "pp")),
    _mutant("F25c", "each rank skips by its own gradients", _agreed_over()),
    _mutant(
        "F26", "the learning-rate schedule advances on a skipped step", _schedule_advances,
        "huggingface/accelerate#4242",
    ),
    _mutant("F26b", "the correction of the moments counts skipped steps", _on_skip(_count)),
    _mutant(
        "F30", "masters are not refreshed after weights only are loaded", _not_refreshed, "NVIDIA/Megatron-LM#174"
    ),
    _mutant("F30b", "masters are not copied back to the model", _not_copied_back),
    _mutant("F30c", "masters are made anew from the model after each step", _made_anew_after_each_step),
    _mutant("F30d", "masters are made from the model where a state is loaded", _masters_not_loaded),
    _mutant("F30e", "a rank that keeps no master of a parameter does not get it", _gathered_into_the_masters_only),
    _mutant("F77", "moments are updated in a step that is skipped", _on_skip(_update_moments)),
    _mutant("F78", "overflow is checked after the step", _checked_after_the_step),
    _mutant("F79", "gradients are divided by the loss scale twice", _unscaled_twice),
    _mutant("F80", "the norm is that of a rank's own gradients", _norm_of_local_gradients),
    _mutant("F81", "all parameters have the learning rate of the first group", _rate_of_the_first_group),
)  # fmt: skip
