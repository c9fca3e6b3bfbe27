"""``shardproof verify``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.commands.output import require_writable
from harness.exit_codes import EXIT_CODES, Command, end

if TYPE_CHECKING:
    from harness.world.delays import Which


def _run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = [
        click.option("--subject", "subjects", multiple=True, help="Only this subject (repeatable)."),
        click.option("--examples", default=100, show_default=True, help="Cases for each subject and candidate."),
        click.option("--max-world", default=8, show_default=True, help="The most ranks of a case."),
        click.option("--dtype", "dtypes", multiple=True, help="Only this dtype: fp32, fp64, bf16, fp16 (repeatable)."),
        click.option("--seed", type=click.IntRange(min=0), help="Draw the same cases again."),
        click.option("--time-budget", type=float, help="Seconds for the whole run; a late failure may add some."),
        click.option("--deadline", default=30.0, show_default=True, help="Seconds for one case."),
        click.option(
            "--delays",
            default="some",
            show_default=True,
            type=click.Choice(["none", "some", "all"]),
            help="Which cases sleep before collectives on some ranks.",
        ),
        click.option(
            "--json",
            "json_file",
            type=click.Path(path_type=Path, dir_okay=False),
            help="Write the run to FILE.",
        ),
        click.option(
            "--save",
            default=Path(".shardproof/failures"),
            show_default=True,
            type=click.Path(path_type=Path, file_okay=False),
            help="Folder for failing cases.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command(cls=Command, epilog=EXIT_CODES)
@click.argument("candidates", nargs=-1, required=True, metavar="CANDIDATE...")
@_run_options
def verify(
    candidates: tuple[str, ...],
    subjects: tuple[str, ...],
    examples: int,
    max_world: int,
    dtypes: tuple[str, ...],
    seed: int | None,
    time_budget: float | None,
    deadline: float,
    delays: Which,
    json_file: Path | None,
    save: Path,
) -> None:
    """Draw cases and run them on each CANDIDATE: a name from `shardproof list`, pkg.module:Class or file.py:Class."""
    from harness.find import parse_spec
    from harness.world import terminate_cleanly, warm_up

    terminate_cleanly()
    specs = [parse_spec(name) for name in candidates]
    from harness.preload import modules

    warm_up(modules(specs))  # the rank server imports torch while this process does
    from harness.engine import caches_elsewhere
    from harness.events import Event
    from harness.report.console import result_console
    from harness.report.json_file import JsonFile
    from harness.report.terminal import TerminalReport
    from harness.verification import exit_code
    from harness.verification import verify as run

    if json_file is not None:
        require_writable(json_file)
    written = JsonFile(json_file)
    with caches_elsewhere(), TerminalReport(result_console()) as report:

        def listen(event: Event) -> None:
            report(event)
            written(event)

        done = run(
            *candidates,
            subjects=subjects or None,
            examples=examples,
            max_world=max_world,
            dtypes=dtypes or None,
            seed=seed,
            time_budget=time_budget,
            deadline=deadline,
            delays=delays,
            save=save,
            listen=listen,
        )
    end(exit_code(done.rows), report.unwritten, lost=written.lost)
