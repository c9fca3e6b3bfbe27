"""``shardproof doctor``."""

from __future__ import annotations

import sys

import click

from harness.exit_codes import Command


@click.command(cls=Command)
def doctor() -> None:
    """Say what is installed, what this machine allows, and whether ranks start."""
    from harness.report.console import result_console
    from harness.report.doctor import print_doctor

    sys.exit(print_doctor(result_console()))
