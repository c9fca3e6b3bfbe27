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


class NoGroupRanks(Right):
    def group_ranks(self, mesh: Mesh, axes: tuple[str, ...]) -> Any:
        return None


class Words(Right):
    def group_ranks(self, mesh: Mesh, axes: tuple[str, ...]) -> Any:
        return [["a"] * mesh.axis_size(axes)] * (mesh.size // mesh.axis_size(axes))


class Ragged(Right):
    def group_ranks(self, mesh: Mesh, axes: tuple[str, ...]) -> Any:
        return [[0], [1, 2]]


class NotNumbers(Right):
    def group_ranks(self, mesh: Mesh, axes: tuple[str, ...]) -> Any:
        return mesh.groups(axes) * float("nan")


class RaisesOnPaper(Right):
    def group_ranks(self, mesh: Mesh, axes: tuple[str, ...]) -> Any:
        raise LookupError("no such axes")
