"""The command ``shardproof``."""

from __future__ import annotations

import click

from harness.commands.doctor import doctor
from harness.commands.list import list_
from harness.commands.mesh import mesh
from harness.commands.replay import replay
from harness.commands.schedule import schedule
from harness.commands.train import train
from harness.commands.verify import verify
from harness.exit_codes import EXIT_CODES, Group


@click.group(cls=Group, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shardproof")
def main() -> None:
    """Checks that sharded training code computes what one process computes."""


for command in (verify, replay, list_, mesh, schedule, train, doctor):
    main.add_command(command)

if __name__ == "__main__":
    main()
