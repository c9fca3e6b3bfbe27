"""``shardproof list``."""

from __future__ import annotations

import click

from harness.exit_codes import Command


@click.command(cls=Command, name="list")
def list_() -> None:
    """List candidates, subjects and mutants."""
    from harness.report.console import result_console
    from harness.report.listing import print_listing

    print_listing(result_console())
