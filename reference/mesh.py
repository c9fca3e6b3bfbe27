"""Mesh arithmetic: which rank sits where, and which ranks form a group.

A mesh cuts a world of ranks along named axes: tensor (tp), context (cp), expert (ep), data (dp) and pipeline
(pp) parallelism, in any order, the fastest-varying axis first. Rank r has coordinate
``(r // stride[axis]) % size[axis]`` on an axis, where an axis' stride is the product of the sizes before it
(Megatron-LM's "order", arXiv 2104.04473, section 3). Everything is vectorised, so a mesh of a million ranks costs
milliseconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

AXES = ("tp", "cp", "ep", "dp", "pp")

#: Combinations of axes that training frameworks make groups for, beside the single axes.
COMBINED_AXES: Mapping[str, tuple[str, ...]] = {
    "model-parallel": ("tp", "pp"),
    "optimizer-state": ("dp", "cp"),
    "tensor-and-data": ("tp", "dp"),
    "tensor-and-context": ("tp", "cp"),
    "tensor-and-expert": ("tp", "ep"),
    "all-but-pipeline": ("tp", "cp", "ep", "dp"),
}

Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class Mesh:
    """Named axes with their sizes, fastest-varying first: ``Mesh((("tp", 2), ("dp", 3)))``.

    An axis that is not named has size 1. Raises ValueError for an unknown or repeated axis and for a size below 1.
    """

    axes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for name, size in self.axes:
            if name not in AXES:
                raise ValueError(f"unknown mesh axis {name!r}: expected one of {', '.join(AXES)}")
            if name in seen:
                raise ValueError(f"mesh axis {name!r} is given twice: name each axis once")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh axis {name!r} has size {size!r}: expected a whole number of at least 1")
            seen.add(name)

    @staticmethod
    def of(world: int | None = None, order: str | None = None, **sizes: int) -> Mesh:
        """A mesh from keyword sizes: ``Mesh.of(tp=2, dp=3)``, in the default order or that of ``order="dp-tp"``.

        Raises ValueError where the sizes do not multiply to ``world``, or ``order`` leaves out an axis above 1.
        """
        names = order.split("-") if order is not None else [a for a in AXES if a in sizes]
        names += [a for a in sizes if a not in names and (order is None or sizes[a] == 1)]
        left_out = [a for a in sizes if a not in names]
        if left_out:
            raise ValueError(f"order {order!r} leaves out axis {left_out[0]!r} of size {sizes[left_out[0]]}: name it")
        mesh = Mesh(tuple((name, sizes.get(name, 1)) for name in names))
        if world is not None:
            mesh.require_world(world)
        return mesh

    @staticmethod
    def parse(text: str, order: str | None = None) -> Mesh:
        """A mesh from ``"tp=2,dp=3"``: in the order written, or in that of ``order="dp-tp"``."""
        pairs: list[tuple[str, int]] = []
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, size = part.partition("=")
            if not equals or re.fullmatch("-?[0-9]{1,18}", size.strip()) is None:
                raise ValueError(f"cannot read {part!r} as an axis: write AXIS=SIZE, for example tp=2,dp=3")
            pairs.append((name.strip(), int(size)))
        mesh = Mesh(tuple(pairs))
        return mesh if order is None else Mesh.of(order=order, **dict(mesh.axes))

    def require_world(self, world: int) -> None:
        """Raises ValueError unless the sizes multiply to ``world`` ranks."""
        if self.size != world:
            product = " x ".join(f"{name}={size}" for name, size in self.axes) or "no axis"
            raise ValueError(
                f"the mesh sizes ({product}) multiply to {self.size}, but the world has {world} ranks: "
                "change a size or the number of ranks"
            )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    def axis_size(self, axes: str | Sequence[str]) -> int:
        """How many coordinates the axis (or the combined axes) has."""
        return math.prod(size for _, size in self._in_order(axes))

    def coordinates(self, ranks: int | Ranks | None = None) -> dict[str, Ranks]:
        """Each named axis' coordinate of the ranks (all of them by default), as int64 arrays of the ranks' shape."""
        rank = np.arange(self.size) if ranks is None else np.asarray(ranks, dtype=np.int64)
        outside = rank[(rank < 0) | (rank >= self.size)]
        if outside.size:
            raise self._outside(int(outside.flat[0]))
        result, stride = {}, 1
        for name, size in self.axes:
            result[name] = (rank // stride) % size
            stride *= size
        return result

    def coordinate(self, rank: int, axes: str | Sequence[str]) -> int:
        """The rank's position in its group along the axis, or along combined axes (in the mesh's order)."""
        if not 0 <= rank < self.size:
            raise self._outside(rank)
        wanted = self._in_order(axes)
        position, stride, inner = 0, 1, 1
        for name, size in self.axes:  # not by `coordinates`: arrays of one rank take longer
            if (name, size) in wanted:
                position += int(rank) // inner % size * stride
                stride *= size
            inner *= size
        return position

    def _outside(self, rank: int) -> ValueError:
        return ValueError(f"rank {rank} is outside the mesh of {self.size} ranks")

    def rank_at(self, coordinates: Mapping[str, int | Ranks]) -> Ranks:
        """The inverse of `coordinates`; an axis that is left out is at 0."""
        rank: Ranks = np.zeros((), dtype=np.int64)
        stride = 1
        for name, size in self.axes:
            rank = rank + np.asarray(coordinates.get(name, 0), dtype=np.int64) * stride
            stride *= size
        return rank

    def groups(self, axes: str | Sequence[str]) -> Ranks:
        """The groups along one axis or combined axes: [groups, group size], ranks ascending in each group,
        groups in the order of their first rank."""
        inside = {name for name, _ in self._in_order(axes)}
        # numpy's last axis varies fastest, ours the first: reverse both.
        grid = np.arange(self.size).reshape([size for _, size in reversed(self.axes)])
        position = {name: len(self.axes) - 1 - i for i, name in enumerate(self.names)}
        outer = [position[name] for name in reversed(self.names) if name not in inside]
        inner = [position[name] for name in reversed(self.names) if name in inside]
        return grid.transpose(outer + inner).reshape(-1, self.axis_size(axes))

    def group_of(self, rank: int, axes: str | Sequence[str]) -> tuple[int, ...]:
        """The ranks of this rank's group, ascending."""
        self.coordinates(rank)  # refuses a rank outside the mesh
        groups = self.groups(axes)
        return tuple(int(r) for r in groups[(groups == rank).any(axis=1)][0])

    def embedding_groups(self) -> Ranks:
        """{first, last} stage of every pipeline, [pipelines, 2]; [pipelines, 1] where pp = 1."""
        stages = self.groups("pp")
        return stages[:, :1] if stages.shape[1] == 1 else stages[:, [0, -1]]

    def position_embedding_groups(self) -> Ranks:
        """{first} stage of every pipeline, [pipelines, 1]."""
        return self.groups("pp")[:, :1]

    def neighbours(self) -> tuple[Ranks, Ranks]:
        """(previous, next) pipeline stage of every rank, cyclic, each [ranks]."""
        at = self.coordinates()
        stage = at.get("pp", np.zeros(self.size, dtype=np.int64))
        p = self.axis_size("pp")
        previous = self.rank_at({**at, "pp": (stage - 1) % p})
        following = self.rank_at({**at, "pp": (stage + 1) % p})
        return np.broadcast_to(previous, (self.size,)), np.broadcast_to(following, (self.size,))

    def chunk(self, stage: int, virtual_stage: int) -> int:
        """The model chunk that a stage runs as its given virtual stage (interleaved 1F1B, arXiv 2104.04473, 2.2)."""
        return virtual_stage * self.axis_size("pp") + stage

    def describe(self, rank: int) -> str:
        """The rank with its mesh coordinates, axes of size 1 left out: ``rank 3 (tp=1, dp=1)``."""
        at = self.coordinates(rank)
        inner = ", ".join(f"{name}={int(at[name])}" for name, size in self.axes if size > 1)
        return f"rank {rank} ({inner})" if inner else f"rank {rank}"

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes) or "one rank"

    def _in_order(self, axes: str | Sequence[str]) -> list[tuple[str, int]]:
        wanted = set(_names(axes))
        unknown = wanted - set(AXES)
        if unknown:
            raise ValueError(f"unknown mesh axis {min(unknown)!r}: expected one of {', '.join(AXES)}")
        return [(name, size) for name, size in self.axes if name in wanted]


def _names(axes: str | Sequence[str]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def as_lists(groups: Iterable[Iterable[int]]) -> list[list[int]]:
    """Groups as plain lists, for messages and for process-group constructors."""
    return [[int(rank) for rank in group] for group in groups]


#: Groups that are not all ranks along some axes, beside those of axes.
SPECIAL_GROUPS = ("embedding", "position-embedding")


@dataclass(frozen=True)
class MeshCase:
    """A mesh whose groups are compared: by arithmetic alone, or ``live``, with process groups on real ranks."""

    mesh: Mesh
    live: bool = False


def expected_groups(mesh: Mesh) -> dict[tuple[str, ...], Ranks]:
    """Every group of the contract, by its axes (or its special name): [groups, group size]."""
    names: list[tuple[str, ...]] = [(axis,) for axis in AXES] + list(COMBINED_AXES.values())
    groups = {axes: mesh.groups(axes) for axes in names}
    groups[("embedding",)] = mesh.embedding_groups()
    groups[("position-embedding",)] = mesh.position_embedding_groups()
    return groups
