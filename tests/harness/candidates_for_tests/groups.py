"""Candidates whose groups are no groups."""

from __future__ import annotations

from typing import Any

from right import Right

from harness import Mesh


class Ranks(Right):
    """Hands back a list of ranks."""

    def group(self, axes: tuple[str, ...]) -> Any:
        return [0, 1]


class NoGroup(Right):
    def group(self, axes: tuple[str, ...]) -> Any:
        return None


class OnRank0Only(Right):
    def group(self, axes: tuple[str, ...]) -> Any:
        return self.tp if axes == ("tp",) and self.rank == 0 else None


class NoGroupRanks(Right):
    def group_ranks(self, mesh: Mesh, axes: tuple[str, ...]) -> Any:
        return None


class Words(Right):
    def group_ranks(self, mesh: Mesh, axes: tuple[str, ...]) -> Any:
        return [["zero", "one"]]


class Ragged(Right):
    def group_ranks(self, mesh: Mesh, axes: tuple[str, ...]) -> Any:
        return [[0], [1, 2]]


class NotNumbers(Right):
    def group_ranks(self, mesh: Mesh, axes: tuple[str, ...]) -> Any:
        return [[0, float("nan")]]


class RaisesOnPaper(Right):
    def group_ranks(self, mesh: Mesh, axes: tuple[str, ...]) -> Any:
        raise LookupError("no such axes")


class AnotherOrder(Right):
    """Lists the groups last first; who is in which group is right."""

    def group_ranks(self, mesh: Mesh, axes: tuple[str, ...]) -> Any:
        return mesh.groups(axes)[::-1] if set(axes) <= {"tp", "dp"} else None


class AnotherOrderAndWrong(Right):
    def group_ranks(self, mesh: Mesh, axes: tuple[str, ...]) -> Any:
        return mesh.groups(("dp",) if axes == ("tp",) else axes)[::-1] if set(axes) <= {"tp", "dp"} else None
