"""The live process groups of a mesh, and the mesh that layers use by default.

torch.distributed names a new group by a counter of its process, and the name is what members find each other by. All
ranks must therefore create the same groups in the same order, members or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from sharded import mesh
from sharded.mesh import AXIS_NAMES, Axes

#: Groups along several axes that training needs, beside those along each axis.
COMBINED_AXES: tuple[tuple[str, ...], ...] = (
    ("tp", "pp"),  # all shards of one model replica: gradient norm, overflow flag
    ("dp", "cp"),  # the same weights, other tokens: gradient reduction, optimizer state
    ("tp", "dp"),
    ("tp", "cp"),
    ("tp", "ep"),
    ("tp", "cp", "ep", "dp"),  # everything within one pipeline stage
)
EMBEDDING = "embedding"
POSITION_EMBEDDING = "position-embedding"


def families(combined: Sequence[tuple[str, ...]] = COMBINED_AXES) -> list[tuple[str, ...]]:
    """The kinds of groups of a mesh, in the order of creation: every axis, combined axes, the embedding groups."""
    return [*((name,) for name in AXIS_NAMES), *combined, (EMBEDDING,), (POSITION_EMBEDDING,)]


def groups_to_create(axes: Axes, family: tuple[str, ...]) -> list[list[int]]:
    """The rank lists of one family, in the order in which this rank creates their groups."""
    if family == (EMBEDDING,):
        ranks_GN = mesh.embedding_ranks(axes)
    elif family == (POSITION_EMBEDDING,):
        ranks_GN = mesh.position_embedding_ranks(axes)
    else:
        ranks_GN = mesh.group_ranks(axes, family)
    groups: list[list[int]] = ranks_GN.tolist()
    return groups


class ProcessGroups:
    """This rank's process group along every axis and combination of axes of a mesh.

    Every rank of the world must construct it, in the same order as other collective work. Families with a group of the
    same ranks share one process group; groups of one rank are made once for each rank. Several may be alive at a time.

    axes: (name, size) pairs, fastest-varying first. combined: the combinations of axes to make groups for.

    Raises ValueError, on every rank and before any group is made, for an axis that is unknown, repeated or has no
    size of 1 or more, and where the sizes do not multiply to the world.
    """

    def __init__(self, axes: Axes, *, combined: Sequence[tuple[str, ...]] = COMBINED_AXES) -> None:
        mesh.validate(axes, dist.get_world_size())
        for names in combined:
            mesh.group_ranks((), names)  # refuses unknown axes
        self.axes = tuple(axes)
        self.rank = dist.get_rank()
        self._mine: dict[frozenset[str], ProcessGroup] = {}
        self._made: dict[tuple[int, ...], ProcessGroup | None] = {}
        for family in families(combined):
            for ranks in groups_to_create(self.axes, family):
                # Which lists repeat is the same on every rank, so skipping them keeps the ranks in step.
                if tuple(ranks) not in self._made:
                    group = dist.new_group(ranks)
                    self._made[tuple(ranks)] = group if self.rank in ranks else None
                mine = self._made[tuple(ranks)]
                if mine is not None:
                    self._mine[frozenset(family)] = mine
        # A group is made on this rank while its members may still be connecting to it: a close soon after, which ends
        # the connections, would fail theirs ("Connection closed by peer").
        dist.barrier()

    def group(self, *names: str) -> ProcessGroup:
        """This rank's group along an axis, or along combined axes in any order.

        Raises ValueError where no such groups were made, or after `close`.
        """
        found = self._mine.get(frozenset(names))
        if found is None or frozenset(names) & {EMBEDDING, POSITION_EMBEDDING}:
            raise ValueError(
                f"there is no group along {names}: expected an axis ({', '.join(AXIS_NAMES)}) or a combination that "
                "was asked for; pass it in combined=, and do not use groups after close()"
            )
        return found

    def group_of_embedding(self) -> ProcessGroup | None:
        """{first, last} stage of this rank's pipeline; None on the stages between."""
        return self._mine.get(frozenset((EMBEDDING,)))

    def group_of_position_embedding(self) -> ProcessGroup | None:
        """{first} stage of this rank's pipeline; None on every other stage."""
        return self._mine.get(frozenset((POSITION_EMBEDDING,)))

    def close(self) -> None:
        """Destroys the groups that this object made. Every rank must call it; calling it again does nothing."""
        global _default
        made, self._made, self._mine = self._made, {}, {}
        for group in made.values():
            if group is not None:
                dist.destroy_process_group(group)
        if _default is self:
            _default = None


_default: ProcessGroups | None = None


def set_default(groups: ProcessGroups | None) -> None:
    """Makes a mesh the one whose groups layers take when they are given none; None leaves none."""
    global _default
    _default = groups


def default_group(axis: str = "tp") -> ProcessGroup:
    """This rank's group along an axis of the default mesh.

    Raises ValueError where no default mesh is set.
    """
    if _default is None:
        raise ValueError(
            f"no default mesh to take the {axis} group from: call set_default(ProcessGroups(axes)) or pass group="
        )
    return _default.group(axis)
