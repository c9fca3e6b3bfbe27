"""``shardproof mesh``."""

from __future__ import annotations

import click

from harness.exit_codes import Command


@click.command(cls=Command)
@click.argument("sizes")
@click.option("--order", help="Axes from fastest to slowest varying, for example dp-tp-pp.")
@click.option("--world", type=int, help="Refuse sizes that do not multiply to so many ranks.")
def mesh(sizes: str, order: str | None, world: int | None) -> None:
    """Show the ranks, coordinates and groups of a mesh, for example tp=2,dp=3."""
    from harness.report.console import result_console
    from harness.report.mesh_table import print_mesh
    from reference.mesh import Mesh

    try:
        made = Mesh.parse(sizes, order)
        if world is not None:
            made.require_world(world)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    print_mesh(result_console(), made)
