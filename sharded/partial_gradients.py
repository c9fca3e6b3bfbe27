"""Gradients of parameters that several ranks hold and each uses for a part of the work, such as its own heads.

The gradient of one process is the *sum* over the ranks that hold the parameter, due once after the last backward of a
step and before anything reads the gradients. Unlike the gradients of `sequence_parallel`, which cover a rank's tokens,
these are partial with and without sequence parallelism.

Where neighbouring ranks hold the same piece of a tensor (the key/value heads of grouped-query attention, where there
are fewer than ranks), the pieces travel beside each other in one all-reduce of the whole group. That sends the whole
tensor, which is a norm's gradient or a few heads', and needs no process group of the holders.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sharded.main_grad import buffer_of


def mark_partial(parameter: torch.Tensor, copies: int) -> None:
    """Says that ``copies`` neighbouring ranks of the group hold the parameter, each with its part of the gradient."""
    parameter.partial_copies = copies  # type: ignore[attr-defined]


def partial_copies(parameter: torch.Tensor) -> int:
    """How many ranks share the parameter's gradient; 1 where `mark_partial` was not called."""
    return int(getattr(parameter, "partial_copies", 1))


def mark_cut(parameter: torch.Tensor) -> None:
    """Says that the ranks of the group, or neighbours among them, hold different pieces of the whole parameter."""
    parameter.is_cut = True  # type: ignore[attr-defined]


def is_cut(parameter: torch.Tensor) -> bool:
    """Whether `mark_cut` was called on the parameter; if not, all ranks of the group hold the same."""
    return bool(getattr(parameter, "is_cut", False))


def finish_partial_gradients(parameters: Iterable[torch.Tensor], group: ProcessGroup) -> None:
    """Sums the gradients (``main_grad`` where there is one, else ``.grad``) of the marked parameters over their ranks.

    One all-reduce for each dtype. Every rank must call it with the same parameters in the same order. Frozen
    parameters are left out; a missing gradient counts as zeros, as it may be missing on some ranks only.
    """
    marked = [(parameter, partial_copies(parameter)) for parameter in parameters]
    sum_over_group([(parameter, copies) for parameter, copies in marked if copies > 1], group)


@torch.no_grad()
def sum_over_group(parameters: Iterable[tuple[torch.Tensor, int]], group: ProcessGroup) -> None:
    """Sums the gradient of each (parameter, copies) over the ``copies`` neighbouring ranks that hold it."""
    if group.size() == 1:
        return
    by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for parameter, copies in parameters:
        if parameter.requires_grad:
            gradient = _gradient(parameter)
            pieces = gradient.new_zeros(group.size() // copies, gradient.numel())
            pieces[group.rank() // copies] = gradient.flatten()
            by_dtype.setdefault(gradient.dtype, []).append((gradient, pieces))
    for pairs in by_dtype.values():
        flat = torch.cat([pieces.flatten() for _, pieces in pairs])
        dist.all_reduce(flat, group=group)
        for (gradient, pieces), part in zip(pairs, flat.split_with_sizes([p.numel() for _, p in pairs]), strict=True):
            copies = group.size() // len(pieces)
            gradient.copy_(part.view(pieces.shape)[group.rank() // copies].view(gradient.shape))


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    buffer = buffer_of(parameter)
    if buffer is not None:
        return buffer
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
