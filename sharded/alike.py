"""Whether parameters are the same on all ranks, before anything is built on it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def require_alike(named: Iterable[tuple[str, torch.Tensor]], options: str, group: ProcessGroup) -> None:
    """named: pairs of name and parameter. Raises ValueError, on every rank of the group, unless parameters agree in
    number, order, name, shape, dtype and whether they train, and options in their text. One gather of these
    descriptions."""
    mine = [options, *_described(named)]
    everyone: list[Any] = [None] * group.size()
    if group.size() > 1:
        dist.all_gather_object(everyone, mine, group=group)
        ranks = dist.get_process_group_ranks(group)
        for rank, theirs in zip(ranks, everyone, strict=True):
            if theirs != everyone[0]:
                raise ValueError(_difference(everyone[0], theirs, ranks[0], rank))


def _described(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    return [f"{name} {tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}" for name, p in named]


def _difference(first: list[str], other: list[str], rank: int, differing: int) -> str:
    what = f"rank {differing} differs from rank {rank} of its data-parallel group"
    todo = "build the same module with the same options on all ranks"
    if first[0] != other[0]:
        return f"{what}: {other[0]}, where rank {rank} has {first[0]}; {todo}"
    if len(first) != len(other):
        return f"{what}: {len(other) - 1} parameters, where rank {rank} has {len(first) - 1}; {todo}"
    if sorted(first) == sorted(other):
        what += " in the order of its parameters"
    index, (a, b) = next((i, pair) for i, pair in enumerate(zip(first, other, strict=True)) if pair[0] != pair[1])
    return f"{what}: parameter {index - 1} is {b}, where rank {rank} has {a}; {todo}"
