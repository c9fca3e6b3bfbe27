"""Faults in the groups of a mesh."""

from __future__ import annotations

import torch.distributed as dist

from sharded import process_groups
from sharded.mesh import Axes
from sharded.mutants import Mutant, Patch


def _reversed_on_half_of_the_ranks() -> list[Patch]:
    original = process_groups.groups_to_create

    def groups_to_create(axes: Axes, family: tuple[str, ...]) -> list[list[int]]:
        groups = original(axes, family)
        return groups[::-1] if _in_upper_half(groups, dist.get_rank()) else groups

    return [(process_groups, "groups_to_create", groups_to_create)]


def _in_upper_half(groups: list[list[int]], rank: int) -> bool:
    """Whether the rank is in the upper half of its group; of the world, where it is alone in it.

    Halves of the group, so that the ranks that meet under one name still have one of each number in the group: their
    sums go astray, as in the thread. With the halves of the world two ranks of one number could meet, and connecting
    them takes until the time-out.
    """
    own = next((group for group in groups if rank in group), [rank])
    if len(own) == 1:
        return 2 * rank >= dist.get_world_size()
    return 2 * own.index(rank) >= len(own)


MUTANTS = (
    Mutant(
        "F01",
        "mesh",
        "half of the ranks create the group lists in reversed order: groups cross-talk",
        "NVIDIA-NeMo/Megatron-Bridge#4985",
        _reversed_on_half_of_the_ranks,
    ),
)
