"""A mesh as tables: coordinates of every rank, and every group."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from reference.mesh import COMBINED_AXES, Mesh, as_lists

_MOST = 64


def print_mesh(console: Console, mesh: Mesh) -> None:
    """Prints the mesh; of a large one the first ranks and groups."""
    console.print(f"{mesh}: {mesh.size} ranks, first axis fastest", highlight=False)
    ranks = Table(box=None, header_style="bold", pad_edge=False)
    ranks.add_column("rank", justify="right")
    for name in mesh.names:
        ranks.add_column(name, justify="right")
    coordinates = mesh.coordinates()
    for rank in range(min(mesh.size, _MOST)):
        ranks.add_row(str(rank), *(str(int(coordinates[name][rank])) for name in mesh.names))
    console.print(ranks)
    if mesh.size > _MOST:
        console.print(f"and {mesh.size - _MOST} more ranks", highlight=False)
    groups = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("groups along", "ranks"):
        groups.add_column(column, overflow="fold")
    for name in mesh.names:
        groups.add_row(name, _text(mesh.groups(name)))
    for label, axes in COMBINED_AXES.items():
        if sum(mesh.axis_size(axis) > 1 for axis in axes) > 1:
            groups.add_row(f"{label} ({' x '.join(axes)})", _text(mesh.groups(axes)))
    groups.add_row("embedding (first, last stage)", _text(mesh.embedding_groups()))
    console.print(groups)


def _text(groups: Iterable[Iterable[int]]) -> str:
    lists = as_lists(groups)
    shown = " ".join(str(group if len(group) <= _MOST else [*group[:_MOST], "..."]) for group in lists[:_MOST])
    return shown + (f" and {len(lists) - _MOST} more" if len(lists) > _MOST else "")
