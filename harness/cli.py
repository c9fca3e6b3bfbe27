"""The command ``shardproof``. Imports are inside the commands, so that each starts fast."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from harness.errors import WrongUse
from harness.world import Terminated, WorldError

EXIT_CODES = (
    "Exit codes: 0 all that was asked ran and holds; 1 a fault in a candidate; "
    "2 wrong use or our own fault; 3 nothing ran."
)


class _Group(click.Group):
    """Gives every end its exit code: our refusals and our own faults 2, Ctrl-C 130, a SIGTERM 143."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Terminated as signal:
            ctx.exit(signal.exit_code)
        except KeyboardInterrupt:
            ctx.exit(130)
        except WrongUse as error:
            raise click.UsageError(str(error)) from error
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except WorldError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(2)
        except Exception:
            click.echo(f"Error: this is a fault of shardproof's own.\n{traceback.format_exc()}", err=True, nl=False)
            ctx.exit(2)


@click.group(cls=_Group, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shardproof")
def main() -> None:
    """Checks that sharded training code computes what one process computes."""


def _console() -> Any:
    """Where results go. Into a file or a pipe they go unfolded, not at the 80 columns of an unknown terminal."""
    from rich.console import Console

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console() if known else Console(width=200)


def _run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = [
        click.option("--subject", "subjects", multiple=True, help="Only this subject (repeatable)."),
        click.option("--examples", default=100, show_default=True, help="Cases for each subject and candidate."),
        click.option("--max-world", default=6, show_default=True, help="The most ranks of a case."),
        click.option("--dtype", "dtypes", multiple=True, help="Only this dtype: fp32, fp64, bf16, fp16 (repeatable)."),
        click.option("--seed", type=click.IntRange(min=0), help="Draw the same cases again."),
        click.option("--time-budget", type=float, help="Seconds for the whole run."),
        click.option("--deadline", default=30.0, show_default=True, help="Seconds for one case."),
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


@main.command(epilog=EXIT_CODES)
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
    from harness.report.json_file import write_json
    from harness.report.terminal import TerminalReport
    from harness.verification import exit_code
    from harness.verification import verify as run

    if json_file is not None and not json_file.resolve().parent.is_dir():
        raise click.UsageError(f"--json {json_file}: there is no folder {json_file.resolve().parent}")
    with TerminalReport(_console()) as report:
        done = run(
            *candidates,
            subjects=subjects or None,
            examples=examples,
            max_world=max_world,
            dtypes=dtypes or None,
            seed=seed,
            time_budget=time_budget,
            deadline=deadline,
            save=save,
            listen=report,
        )
    if json_file is not None:
        try:
            write_json(json_file, done)
        except OSError as error:
            click.echo(f"Error: cannot write --json {json_file}: {error.strerror}", err=True)
            sys.exit(2)
    sys.exit(exit_code(done.rows))


@main.command(epilog=EXIT_CODES)
@click.argument("case")
@click.option("--deadline", default=30.0, show_default=True, help="Seconds for the case.")
def replay(case: str, deadline: float) -> None:
    """Run a failing CASE again in new processes: the JSON line that a failure printed, or the file that it saved."""
    from harness.world import terminate_cleanly

    terminate_cleanly()
    from harness.bench import CandidateUnusable
    from harness.case_file import read
    from harness.events import Failure
    from harness.replay import replay as run
    from harness.report.terminal import print_failure
    from harness.verdict import Verdict

    reproducer, console = read(case), _console()
    try:
        verdict = run(reproducer, deadline=deadline)
    except CandidateUnusable as error:
        verdict = Verdict(error.findings)
    if verdict.findings:
        print_failure(console, Failure(reproducer, verdict))
        sys.exit(2 if verdict.kind == "harness" else 1)
    if verdict.rejected is not None:
        console.print(f"nothing ran: the candidate refuses the case: {verdict.rejected}", markup=False, soft_wrap=True)
        sys.exit(3)
    console.print(f"holds: {reproducer.candidate}, {reproducer.subject}", style="green", markup=False, soft_wrap=True)


@main.command(name="list")
def list_() -> None:
    """List candidates, subjects and mutants."""
    from harness.report.listing import print_listing

    print_listing(_console())


@main.command()
@click.argument("sizes")
@click.option("--order", help="Axes from fastest to slowest varying, for example dp-tp-pp.")
@click.option("--world", type=int, help="Refuse sizes that do not multiply to so many ranks.")
def mesh(sizes: str, order: str | None, world: int | None) -> None:
    """Show the ranks, coordinates and groups of a mesh, for example tp=2,dp=3."""
    from harness.report.mesh_table import print_mesh
    from reference.mesh import Mesh

    try:
        made = Mesh.parse(sizes, order)
        if world is not None:
            made.require_world(world)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    print_mesh(_console(), made)


@main.command()
def doctor() -> None:
    """Say what is installed, what this machine allows, and whether ranks start."""
    from harness.report.doctor import print_doctor

    sys.exit(print_doctor(_console()))


if __name__ == "__main__":
    main()
