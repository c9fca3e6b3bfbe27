"""Mesh arithmetic: where a rank sits, and which ranks form a group. Pure; the live groups are in process_groups.py.

Axes are (name, size) pairs, the fastest-varying first: ``[("tp", 2), ("dp", 4)]``. Rank r sits at coordinate
``r // stride % size`` of an axis, where the stride is the product of the sizes before it. An axis that is not named
has size 1. Placement of tensor, data and pipeline groups as in Megatron-LM (arXiv 2104.04473).

Legend: G groups, N ranks in each, W ranks in the world. All results are int64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

Axes: TypeAlias = Sequence[tuple[str, int]]

#: Tensor, context, expert, data and pipeline parallelism, in the default order.
AXIS_NAMES = ("tp", "cp", "ep", "dp", "pp")


def validate(axes: Axes, world: int | None = None) -> None:
    """Raises ValueError for an axis that is unknown, repeated or has no size of 1 or more; where ``world`` is given,
    also unless the sizes multiply to it."""
    seen: set[str] = set()
    for name, size in axes:
        _require_known(name)
        if name in seen:
            raise ValueError(f"mesh axis {name!r} is given twice in {list(axes)}: name each axis once")
        # bool is an int to Python, and True would silently be a size of 1.
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"mesh axis {name!r} has size {size!r}: expected an int of at least 1")
        seen.add(name)
    if world is not None and world_size(axes) != world:
        raise ValueError(
            f"the mesh sizes {dict(axes)} multiply to {world_size(axes)}: expected {world}, the ranks of the world; "
            "change a size or start another number of ranks"
        )


def world_size(axes: Axes) -> int:
    """The number of ranks of the mesh."""
    return math.prod(size for _, size in axes)


def axis_size(axes: Axes, name: str) -> int:
    """The size of an axis; 1 where the mesh does not name it."""
    _require_known(name)
    return dict(axes).get(name, 1)


def coordinates(axes: Axes, rank: int) -> dict[str, int]:
    """The rank's coordinate on each of the five axes.

    Raises ValueError for an invalid mesh or a rank outside it.
    """
    validate(axes)
    if not 0 <= rank < world_size(axes):
        raise ValueError(f"rank {rank} is outside the mesh {dict(axes)}: expected 0 to {world_size(axes) - 1}")
    found = dict.fromkeys(AXIS_NAMES, 0)
    for name, size in axes:
        rank, found[name] = divmod(rank, size)
    return found


def rank_at(axes: Axes, at: Mapping[str, int]) -> int:
    """The rank at the coordinates, the inverse of `coordinates`; an axis that is left out is at 0.

    Raises ValueError for an invalid mesh, an unknown axis or a coordinate outside its axis.
    """
    validate(axes)
    for name, coordinate in at.items():
        if not 0 <= coordinate < axis_size(axes, name):
            raise ValueError(
                f"coordinate {name}={coordinate} is outside the mesh {dict(axes)}: "
                f"expected 0 to {axis_size(axes, name) - 1}"
            )
    rank = 0
    for name, size in reversed(axes):
        rank = rank * size + at.get(name, 0)
    return rank


def group_ranks(axes: Axes, names: str | Sequence[str]) -> torch.Tensor:
    """The groups along one axis, or along several combined, [G, N]: ranks ascending in each group, groups in the
    order of their first rank.

    Raises ValueError for an invalid mesh or an unknown axis.
    """
    validate(axes)
    wanted = {names} if isinstance(names, str) else set(names)
    for name in wanted:
        _require_known(name)
    ranks_W = torch.arange(world_size(axes))
    first_W, stride, members = ranks_W.clone(), 1, 1
    for name, size in axes:
        if name in wanted:
            # A group's lowest rank is the member at 0 on every axis that the group runs along.
            first_W -= (ranks_W // stride % size) * stride
            members *= size
        stride *= size
    # Stable: ranks stay ascending among those that share a lowest rank.
    return torch.argsort(first_W, stable=True).view(-1, members)


def embedding_ranks(axes: Axes) -> torch.Tensor:
    """The {first, last} stage of every pipeline, which share the tied embedding: [G, 2], or [G, 1] where pp is 1."""
    stages_GN = group_ranks(axes, "pp")
    return stages_GN if stages_GN.shape[1] == 1 else stages_GN[:, [0, -1]]


def position_embedding_ranks(axes: Axes) -> torch.Tensor:
    """The first stage of every pipeline, which alone has the position embedding: [G, 1]."""
    return group_ranks(axes, "pp")[:, :1]


def optimizer_state_ranks(axes: Axes) -> torch.Tensor:
    """The groups over which ZeRO-1 (arXiv 1910.02054) cuts the optimizer's state: dp x cp, the ranks that hold the
    same weights and see different tokens. [G, N]."""
    return group_ranks(axes, ("dp", "cp"))


class Stages(NamedTuple):
    """Ranks of one pipeline as one of its stages sees them; previous and next are cyclic."""

    first: int
    last: int
    previous: int
    next: int


def stage_neighbours(axes: Axes, rank: int) -> Stages:
    """The first, last, previous and next stage's rank in the pipeline of ``rank``.

    Cyclic, because an interleaved schedule sends from the last stage on to the first.
    """
    at = coordinates(axes, rank)
    stages = axis_size(axes, "pp")
    first, last, previous, following = (
        rank_at(axes, {**at, "pp": stage % stages}) for stage in (0, stages - 1, at["pp"] - 1, at["pp"] + 1)
    )
    return Stages(first, last, previous, following)


def chunk_index(axes: Axes, stage: int, virtual: int) -> int:
    """The model chunk that a stage runs as its ``virtual``-th one: virtual * pp + stage, so that consecutive chunks lie
    on consecutive stages (interleaved schedule, arXiv 2104.04473, section 2.2).

    Raises ValueError for a stage outside the pipeline or a negative virtual index.
    """
    stages = axis_size(axes, "pp")
    if not 0 <= stage < stages or virtual < 0:
        raise ValueError(
            f"there is no virtual stage {virtual} of stage {stage}: expected a stage of 0 to {stages - 1} and a "
            "virtual index of at least 0"
        )
    return virtual * stages + stage


def stage_of_chunk(axes: Axes, chunk: int) -> tuple[int, int]:
    """(stage, virtual index) that run a model chunk, the inverse of `chunk_index`."""
    if chunk < 0:
        raise ValueError(f"there is no model chunk {chunk}: expected an index of at least 0")
    virtual, stage = divmod(chunk, axis_size(axes, "pp"))
    return stage, virtual


def _require_known(name: str) -> None:
    if name not in AXIS_NAMES:
        raise ValueError(f"unknown mesh axis {name!r}: expected one of {', '.join(AXIS_NAMES)}")
