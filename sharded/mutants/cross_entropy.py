"""Faults in vocabulary-parallel cross entropy."""

from __future__ import annotations

import dataclasses
import math

import torch

from sharded import cross_entropy
from sharded.collectives import gather_from_group
from sharded.cross_entropy import Plan
from sharded.mutants import Mutant, Patch


def _local_shares(plan: Plan) -> tuple[float, float]:
    """Label smoothing as if this rank's columns were the whole vocabulary."""
    alpha, k = plan.label_smoothing, max(1, plan.own)
    spread = alpha * k / max(1, k - 1) if plan.smoothing == "megatron" else alpha
    return 1 - spread, spread / k


def _subtract_local_shares(grad: torch.Tensor, here: torch.Tensor, column: torch.Tensor, plan: Plan) -> None:
    of_target, of_every = _local_shares(plan)
    if plan.own:
        grad.scatter_add_(-1, column.unsqueeze(-1), -(of_target * here.to(grad.dtype)).unsqueeze(-1))
    if plan.label_smoothing:
        grad.sub_(of_every)


def _local_smoothing() -> list[Patch]:
    original = cross_entropy.aimed_at

    def aimed_at(x: torch.Tensor, here: torch.Tensor, column: torch.Tensor, plan: Plan) -> torch.Tensor:
        aim = original(x, here, column, dataclasses.replace(plan, label_smoothing=0.0))
        if plan.label_smoothing:
            of_target, of_every = _local_shares(plan)
            aim = of_target * aim + of_every * x.sum(-1)
        return aim

    return [
        (cross_entropy, "aimed_at", aimed_at),
        (cross_entropy, "subtract_shares", _subtract_local_shares),
    ]


def _local_smoothing_in_backward() -> list[Patch]:
    return [(cross_entropy, "subtract_shares", _subtract_local_shares)]


def _gathered_logits() -> list[Patch]:
    original = cross_entropy.loss_of

    def loss_of(logits: torch.Tensor, targets: torch.Tensor, plan: Plan) -> torch.Tensor:
        n, width = plan.group.size(), plan.columns
        whole = gather_from_group(logits, plan.group, dim=-1, length=width)
        # The loss believes that every rank has so many columns of a vocabulary n times as large.
        first = plan.group.rank() * width
        gathered = dataclasses.replace(plan, first=first, own=plan.vocabulary, vocabulary=n * plan.vocabulary)
        return original(whole, targets, gathered)

    return [(cross_entropy, "loss_of", loss_of)]


def _logits_changed_in_place() -> list[Patch]:
    def below(x: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        return x.sub_(top.unsqueeze(-1))

    return [(cross_entropy, "below", below)]


def _ignored_tokens_counted() -> list[Patch]:
    def counted(valid: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        count = valid.numel() if bool(valid.any()) else 0
        return torch.tensor(count, dtype=dtype, device=valid.device)

    return [(cross_entropy, "counted", counted)]


def _own_maximum() -> list[Patch]:
    def largest(x: torch.Tensor, plan: Plan) -> torch.Tensor:
        return x.amax(-1) if plan.own else x.new_full(x.shape[:-1], -math.inf)

    return [(cross_entropy, "largest", largest)]


def _target_not_masked() -> list[Patch]:
    def here(self: Plan, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        column = targets - self.first
        column = column.masked_fill((column < 0) | (column >= self.own), 0)
        return torch.ones_like(targets, dtype=torch.bool), column

    return [(Plan, "here", here)]


MUTANTS = (
    Mutant(
        "F15",
        "cross_entropy",
        "label smoothing with the local width and the local mean",
        "NVIDIA/Megatron-LM#7464",
        _local_smoothing,
    ),
    Mutant(
        "F16",
        "cross_entropy",
        "label smoothing right forward, with the local width in backward",
        "NVIDIA/Megatron-LM#7464",
        _local_smoothing_in_backward,
    ),
    Mutant(
        "F17",
        "cross_entropy",
        "gathered logits into the parallel loss: off by log(tp)",
        "NVIDIA/Megatron-LM#7452",
        _gathered_logits,
    ),
    Mutant(
        "F18",
        "cross_entropy",
        "fp32 logits are changed in place",
        "NVIDIA/Megatron-LM#1594",
        _logits_changed_in_place,
    ),
    Mutant(
        "F20",
        "cross_entropy",
        "ignored tokens are counted in the mean, and all ignored gives 0/0",
        "NVIDIA/TransformerEngine#2476",
        _ignored_tokens_counted,
    ),
    Mutant("F21", "cross_entropy", "the maximum is not reduced over tp", "own", _own_maximum),
    Mutant("F22", "cross_entropy", "a target outside the shard is not masked", "own", _target_not_masked),
)
