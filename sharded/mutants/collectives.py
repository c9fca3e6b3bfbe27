"""Faults in the differentiable collectives, which show in the layers that use them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sharded import wire
from sharded.collectives import GatherFromGroup, ReduceFromGroup
from sharded.mutants import Mutant, Patch


def _returns_what_it_did_not_reduce() -> list[Patch]:
    def all_reduced(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        if group.size() > 1:
            dist.all_reduce(x.contiguous(), group=group)
        return x

    return [(wire, "all_reduced", all_reduced)]


def _gather_sums_equal_gradients() -> list[Patch]:
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return wire.reduce_scattered(grad, ctx.group, ctx.dim), None, None, None

    return [(GatherFromGroup, "backward", staticmethod(backward))]


def _reduced_again_in_backward() -> list[Patch]:
    original = ReduceFromGroup.forward

    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return original(ctx, x, group)

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return wire.all_reduced(grad, ctx.group), None

    return [
        (ReduceFromGroup, "forward", staticmethod(forward)),
        (ReduceFromGroup, "backward", staticmethod(backward)),
    ]


MUTANTS = (
    Mutant(
        "F06",
        "collectives",
        "reduces a contiguous copy and returns the original",
        "NVIDIA/Megatron-LM#5337",
        _returns_what_it_did_not_reduce,
    ),
    Mutant(
        "F12",
        "collectives",
        "backward of a gather before replicated work is a reduce-scatter where a split is due: gradient times tp",
        "NVIDIA/Megatron-LM#7452",
        _gather_sums_equal_gradients,
    ),
    Mutant(
        "F51",
        "collectives",
        "backward of the output-side reduction all-reduces again: gradient times n",
        "pytorch/pytorch#58005",
        _reduced_again_in_backward,
    ),
)
