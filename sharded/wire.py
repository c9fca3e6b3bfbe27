"""The collectives as the layers need them, without gradients: any dimension, any cut, always one call on the wire.

Results are new contiguous tensors and arguments stay as they are. In a group of one rank nothing is sent and the
argument itself may come back. Pieces are cut in balance (cut.py); where they are uneven they travel padded to the
longest, because gloo gathers equal sizes only (torch 2.13) and padding is the same on every backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sharded.cut import cut, piece

# torch 2.13 deprecates the older names; 2.6 has only those.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduced(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum over the group, of x's shape."""
    if group.size() == 1:
        return x
    # A collective reads and writes memory in order, whatever the strides say: hand it a contiguous copy, return that.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def maximum(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The largest of the group for each element, of x's shape. A NaN may be lost on the way, as gloo loses some."""
    if group.size() == 1:
        return x
    largest = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def own_piece(x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
    """This rank's piece of dimension ``dim``. Sends nothing."""
    if group.size() == 1:
        return x
    offset, length = piece(x.shape[dim], group.size(), group.rank())
    return x.narrow(dim, offset, length).clone(memory_format=torch.contiguous_format)


def gathered(x: torch.Tensor, group: ProcessGroup, dim: int, length: int | None = None) -> torch.Tensor:
    """The ranks' pieces, joined along ``dim``.

    length: of the joined dimension; without it the pieces must be even, and it is the group's size times x's.

    Raises ValueError, before anything is sent, where x is not this rank's piece of ``length``.
    """
    n = group.size()
    length = whole_length(x, group, dim, length)
    if n == 1:
        return x
    lengths = cut(length, n)
    front = padded(x.movedim(dim, 0), lengths[0])
    joined = front.new_empty(n * lengths[0], *front.shape[1:])
    all_gather_single(joined, front, group=group)
    if lengths[0] != lengths[-1]:
        joined = torch.cat([part[:k] for part, k in zip(joined.chunk(n), lengths, strict=True)])
    return joined.movedim(0, dim).contiguous()


def reduce_scattered(x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
    """This rank's piece, along ``dim``, of the sum over the group."""
    n = group.size()
    if n == 1:
        return x
    lengths = cut(x.shape[dim], n)
    front = x.movedim(dim, 0)
    if lengths[0] != lengths[-1]:
        front = torch.cat([padded(part, lengths[0]) for part in front.split_with_sizes(lengths)])
    own = front.new_empty(lengths[0], *front.shape[1:])
    _reduce_scatter(own, front.contiguous(), group=group)
    return own[: lengths[group.rank()]].movedim(0, dim).contiguous()


def whole_length(x: torch.Tensor, group: ProcessGroup, dim: int, length: int | None) -> int:
    """The length of the dimension that x is a piece of.

    Raises ValueError where x is not this rank's piece of ``length``.
    """
    if length is None:
        return x.shape[dim] * group.size()
    expected = piece(length, group.size(), group.rank())[1]
    if x.shape[dim] != expected:
        raise ValueError(
            f"dimension {dim} of a tensor of shape {tuple(x.shape)} has length {x.shape[dim]}: expected {expected}, "
            f"piece {group.rank()} of {length} cut over {group.size()} ranks; pass the balanced piece"
        )
    return length


def padded(front: torch.Tensor, length: int) -> torch.Tensor:
    """The tensor with zeros after its first dimension up to ``length``, contiguous."""
    missing = length - front.shape[0]
    return torch.cat([front, front.new_zeros(missing, *front.shape[1:])]) if missing else front.contiguous()
