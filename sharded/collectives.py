"""Differentiable collectives, each with its conjugate as backward.

| function | forward | backward | Megatron-LM's letter |
|---|---|---|---|
| copy_to_group | identity | all-reduce | f (arXiv 1909.08053, section 3) |
| reduce_from_group | all-reduce | identity | g |
| scatter_to_group | own piece | all-gather | |
| gather_from_group | all-gather | own piece | |
| gather_sequence | all-gather | reduce-scatter | g (arXiv 2205.05198, section 4.2) |
| reduce_scatter_to_group | reduce-scatter | all-gather | g-bar |

gather_from_group is for work that every rank repeats on the whole tensor: all ranks have the same whole gradient, and
each keeps its piece. gather_sequence is for work that differs between ranks, whose gradients have to be summed.

Each sends one collective, nothing in a group of one rank, and takes any strides and dtype. Dimensions are cut in
balance (cut.py). The functions that gather take the ``length`` of the joined dimension; without it the pieces must
be even. All but copy_to_group return tensors of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from sharded import wire
from sharded.autograd import apply


def copy_to_group(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """x itself; its gradient is summed over the group. Enters work whose weights are cut over the group."""
    return x if group.size() == 1 else apply(CopyToGroup, x, group)


def reduce_from_group(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum over the group; the gradient passes unchanged. Leaves work whose results are partial sums."""
    return x if group.size() == 1 else apply(ReduceFromGroup, x, group)


def scatter_to_group(x: torch.Tensor, group: ProcessGroup, dim: int = -1) -> torch.Tensor:
    """This rank's piece of dimension ``dim``; the pieces' gradients are joined."""
    return x if group.size() == 1 else apply(ScatterToGroup, x, group, dim)


def gather_from_group(x: torch.Tensor, group: ProcessGroup, dim: int = -1, length: int | None = None) -> torch.Tensor:
    """The pieces joined along ``dim``, for work that every rank repeats; each keeps its piece of the gradient."""
    return x if group.size() == 1 else apply(GatherFromGroup, x, group, dim, length)


def gather_sequence(x: torch.Tensor, group: ProcessGroup, dim: int = 0, length: int | None = None) -> torch.Tensor:
    """The pieces joined along ``dim``, for work that is cut over the group; gradients are summed and cut."""
    return x if group.size() == 1 else apply(GatherSequence, x, group, dim, length)


def reduce_scatter_to_group(x: torch.Tensor, group: ProcessGroup, dim: int = 0) -> torch.Tensor:
    """This rank's piece, along ``dim``, of the sum over the group; the pieces' gradients are joined."""
    return x if group.size() == 1 else apply(ReduceScatterToGroup, x, group, dim)


# The shapes below: ``...`` is any dimensions, D the whole length of ``dim`` and d this rank's piece of it.


class CopyToGroup(torch.autograd.Function):
    """[...] -> [...]"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return wire.all_reduced(grad, ctx.group), None


class ReduceFromGroup(torch.autograd.Function):
    """[...] -> [...]"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        return wire.all_reduced(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None


class ScatterToGroup(torch.autograd.Function):
    """[..., D, ...] -> [..., d, ...]"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.length = group, dim, x.shape[dim]
        return wire.own_piece(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return wire.gathered(grad, ctx.group, ctx.dim, ctx.length), None, None


class GatherFromGroup(torch.autograd.Function):
    """[..., d, ...] -> [..., D, ...]"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int, length: int | None) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return wire.gathered(x, group, dim, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return wire.own_piece(grad, ctx.group, ctx.dim), None, None, None


class GatherSequence(torch.autograd.Function):
    """[..., d, ...] -> [..., D, ...]"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int, length: int | None) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return wire.gathered(x, group, dim, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return wire.reduce_scattered(grad, ctx.group, ctx.dim), None, None, None


class ReduceScatterToGroup(torch.autograd.Function):
    """[..., D, ...] -> [..., d, ...]"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.length = group, dim, x.shape[dim]
        return wire.reduce_scattered(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return wire.gathered(grad, ctx.group, ctx.dim, ctx.length), None, None
