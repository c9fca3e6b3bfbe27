"""Small models in stages, whole numbers in float64, for the tests of the shipped pipeline: what one process computes
with them is exact, and so must be what the stages compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from sharded_ranks import integers, same
from torch import nn

from sharded.pipeline import Pipeline
from sharded.pipeline_batch import TokenLoss
from sharded.random import RandomTracker, dropout

WIDTH, LENGTH = 2, 2


class Part(nn.Module):
    """Stage ``number`` of ``stages``: x @ W, and what crosses borders beside x where ``several``: a copy of the first
    stage's result, added in every stage, and whole numbers. The last one returns the loss of each token."""

    def __init__(self, number: int, stages: int, steps: Steps) -> None:
        super().__init__()
        self.number, self.last, self.steps = number, number == stages - 1, steps
        same_as = 0 if number in steps.tied else number
        self.weight = nn.Parameter(
            integers(f"w{same_as}", WIDTH, WIDTH).clamp(-1, 1), requires_grad=number not in steps.frozen
        )
        if number in steps.empty:
            del self.weight
        self.tracker = RandomTracker(number, dist.group.WORLD) if dist.is_initialized() else None
        self.masks: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> Any:
        if self.steps.fails == self.number and len(self.masks) == self.steps.fails_at:
            raise ArithmeticError(f"stage {self.number} will not")
        self.masks.append(torch.zeros(()))
        skip = rest[0] if self.number > 0 and self.steps.several else None
        if skip is not None:
            x = x + skip + rest[1].unsqueeze(-1)
        if self.number not in self.steps.empty:
            x = x @ self.weight
        if self.steps.p:
            if self.tracker is not None and self.steps.tracked:
                x = dropout(x, self.steps.p, self.tracker, "replicated")
            else:
                x = F.dropout(x, self.steps.p)
        if self.last:
            return x.sum(-1)
        if not self.steps.several:
            return x
        ids = rest[-1]
        return x, x if skip is None else skip, ids


@dataclass(frozen=True)
class Steps:
    """What is trained: the schedule, stages on each rank, samples of each micro-batch, and what is special."""

    schedule: Any = "1f1b"
    chunks: int = 1
    sizes: tuple[int, ...] = (1, 2, 1)
    several: bool = False
    tied: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    empty: tuple[int, ...] = ()
    p: float = 0.0
    tracked: bool = False
    steps: int = 1
    zeroed: bool = True
    loss: Any = "token_mean"
    fails: int = -1
    fails_at: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def batch(self, step: int) -> tuple[list[tuple[torch.Tensor, ...]], list[torch.Tensor]]:
        """Inputs and masks of each micro-batch. A power of two of valid tokens in all, and none in some."""
        count = sum(self.sizes)
        x = integers(f"x{step}", count, LENGTH, WIDTH)
        ids = integers(f"i{step}", count, LENGTH).abs().long()
        valid = torch.zeros(count, LENGTH, dtype=torch.bool)
        order = torch.randperm(valid.numel(), generator=torch.Generator().manual_seed(1))
        valid.view(-1)[order[: 1 << (valid.numel().bit_length() - 2)]] = True
        tensors = (x, ids) if self.several else (x,)
        cut = list(zip(*(torch.split(one, list(self.sizes)) for one in tensors), strict=True))
        return cut, list(torch.split(valid, list(self.sizes)))


def pipeline_of(steps: Steps, group: dist.ProcessGroup, **more: Any) -> tuple[Pipeline, list[Part]]:
    ranks = group.size()
    parts = [Part(chunk * ranks + group.rank(), steps.chunks * ranks, steps) for chunk in range(steps.chunks)]
    tied = {"tied": [(part.number, part.weight) for part in parts if part.number in steps.tied]}
    trackers = [part.tracker for part in parts if part.tracker is not None] if steps.tracked else []
    options = {"schedule": steps.schedule, "tied": tied, "trackers": trackers, **steps.options, **more}
    return Pipeline(parts, group, TokenLoss(steps.loss), **options), parts


def problems_of(steps: Steps, group: dist.ProcessGroup, **more: Any) -> list[str]:
    """Trains on this rank, and beside it one process on the whole batch; what differs."""
    pipeline, parts = pipeline_of(steps, group, **more)
    stages = steps.chunks * group.size()
    whole = [Part(number, stages, steps) for number in range(stages)]
    problems: list[str] = []
    for step in range(steps.steps):
        inputs, masks = steps.batch(step)
        if steps.zeroed:
            for part in (*parts, *whole):
                part.zero_grad()
        loss = pipeline.step(inputs, masks)
        tensors: Sequence[torch.Tensor] = [torch.cat([one[i] for one in inputs]) for i in range(len(inputs[0]))]
        for part in whole:
            found = part(*tensors)
            tensors = found if isinstance(found, tuple) else (found,)
        right = torch.where(torch.cat(masks), tensors[0], 0).sum()
        right = right / torch.cat(masks).sum() if steps.loss == "token_mean" else right
        right.backward()
        if any(part.last for part in parts):
            problems += same("loss", loss, right)
        elif loss is not None:
            problems.append(f"loss is {loss} on a rank without the last stage")
        tied = [whole[number].weight.grad for number in steps.tied]
        together = None if None in tied[:1] else sum(tied)
        for part in parts:
            if part.number not in steps.empty:
                due = together if part.number in steps.tied else whole[part.number].weight.grad
                problems += same(f"the gradient of stage {part.number} in step {step}", part.weight.grad, due)
    return problems
