"""A mesh as tables: coordinates of every rank, and every group."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from harness.errors import WrongUse
from harness.world.limits import available_memory
from reference.mesh import COMBINED_AXES, Mesh, Ranks, as_lists

_MOST = 64
_BYTES_A_RANK = 8 * 4  # its number, in a few arrays at a time


def print_mesh(console: Console, mesh: Mesh) -> None:
    """Prints the mesh; of a large one the first ranks and groups. Raises WrongUse for one that memory cannot hold."""
    available = available_memory()
    if available is not None and mesh.size * _BYTES_A_RANK > available:
        most = available // _BYTES_A_RANK
        raise WrongUse(f"a mesh of {mesh.size} ranks does not fit into the memory that is available: at most {most} do")
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


def _text(groups: Ranks) -> str:
    count, size = groups.shape
    rest = [] if size <= _MOST else ["..."]
    shown = " ".join(str([*group, *rest]) for group in as_lists(groups[:_MOST, :_MOST]))
    return shown + (f" and {count - _MOST} more" if count > _MOST else "")
