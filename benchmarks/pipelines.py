"""What ranks run in activation_memory.py and pipeline_grid.py: a module of its own, so that they import little else."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sharded.pipeline import Pipeline
from sharded.pipeline_batch import TokenLoss


class Layers(nn.Module):
    """Blocks of two linear layers and a GELU, [samples, tokens, hidden]; the last stage returns losses of tokens."""

    def __init__(self, hidden: int, blocks: int, last: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
            for _ in range(blocks)
        )
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.sum(-1) if self.last else x


def stored(context: Any, kind: Any, recompute: bool, micro_batches: int, hidden: int, blocks: int, tokens: int) -> int:
    """The most bytes that this rank stores for activations in one step of so many micro-batches of one sample."""
    last = context.rank == context.world_size - 1
    pipeline = _pipeline([Layers(hidden, blocks, last)], kind, recompute=recompute, measure=True)
    x = torch.zeros(micro_batches, 1, tokens, hidden)
    valid = torch.ones(micro_batches, 1, tokens, dtype=torch.bool)
    # Each in memory of its own: a view keeps all of a batch.
    pipeline.step([(one.clone(),) for one in x], [one.clone() for one in valid])
    return pipeline.record.stored


def inputs(context: Any, micro_batches: int, hidden: int, tokens: int) -> int:
    """The bytes of a stage's input in one micro-batch."""
    return tokens * hidden * torch.empty(()).element_size()


def recorded(context: Any, cases: list[tuple[Any, int, int]]) -> list[tuple[Any, int]]:
    """For each (kind, chunks, micro-batches): the actions that this rank took in one step, and the most micro-batches
    that were in flight."""
    found = []
    for kind, chunks, micro_batches in cases:
        p, rank = context.world_size, context.rank
        stages = [Layers(1, 1, chunk * p + rank == chunks * p - 1) for chunk in range(chunks)]
        pipeline = _pipeline(stages, kind)
        x, valid = torch.ones(micro_batches, 1, 1, 1), torch.ones(micro_batches, 1, 1, dtype=torch.bool)
        pipeline.step([(one,) for one in x], list(valid))
        found.append((pipeline.record.actions, pipeline.record.in_flight))
    return found


def _pipeline(stages: list[nn.Module], kind: Any, **options: Any) -> Pipeline:
    group = dist.group.WORLD
    assert group is not None
    return Pipeline(stages, group, TokenLoss("token_mean"), schedule=kind, **options)
