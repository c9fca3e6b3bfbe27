"""The command ``shardproof``. Imports are inside the commands, so that each starts fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.exit_codes import EXIT_CODES, Group, end
from harness.report.streams import CannotPrint

if TYPE_CHECKING:
    from harness.world.delays import Which
    from reference.schedule_rules import Checked


@click.group(cls=Group, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shardproof")
def main() -> None:
    """Checks that sharded training code computes what one process computes."""


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
        _require_writable(json_file)
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


def _require_writable(file: Path) -> None:
    """Better now than after an hour. What can go wrong only in writing is told then."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise click.UsageError(f"--json {file}: there is no folder {folder}")
    if not os.access(file if os.path.lexists(file) else folder, os.W_OK):
        raise click.UsageError(f"--json {file}: it cannot be written to")


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
    from harness.replay import DELAYS
    from harness.replay import replay as run
    from harness.report.console import print_line, result_console
    from harness.report.terminal import print_failure
    from harness.verdict import Verdict

    reproducer, console = read(case), result_console()
    try:
        verdict = run(reproducer, deadline=deadline)
    except CandidateUnusable as error:
        verdict = Verdict(error.findings)
    code, unwritten = 0, None
    try:
        if verdict.findings:
            code = 2 if verdict.kind == "harness" else 1
            late = verdict.facts.get(DELAYS)
            if late is not None:
                print_line(console, f"holds where no rank is late, and fails with delays of seed {late}: a race")
                reproducer = replace(reproducer, delays=late)
            print_failure(console, Failure(reproducer, verdict))
        elif verdict.rejected is not None:
            code = 3
            print_line(console, f"nothing ran: the candidate refuses the case: {verdict.rejected}")
        else:
            print_line(console, f"holds, with delays too: {reproducer.candidate}, {reproducer.subject}", "green")
    except CannotPrint as error:
        unwritten = error
    end(code, unwritten)


@main.command(name="list")
def list_() -> None:
    """List candidates, subjects and mutants."""
    from harness.report.console import result_console
    from harness.report.listing import print_listing

    print_listing(result_console())


@main.command()
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


@main.command(epilog=EXIT_CODES)
@click.option("--kind", required=True, help="gpipe, 1f1b, interleaved, or another that the candidate has.")
@click.option("--stages", required=True, type=int, help="Ranks of the pipeline.")
@click.option("--micro-batches", required=True, type=int, help="Micro-batches of a step.")
@click.option("--chunks", default=1, show_default=True, type=int, help="Virtual stages on each rank.")
@click.option("--candidate", default="builtin", show_default=True, help="Whose schedule, as for `verify`.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw it into FILE (needs matplotlib).")
@click.option("--deadline", default=30.0, show_default=True, help="Seconds for the candidate to list it.")
def schedule(
    kind: str, stages: int, micro_batches: int, chunks: int, candidate: str, plot: Path | None, deadline: float
) -> None:
    """Show a pipeline schedule in time, check its rules, and compare it with the formulas. Nothing is trained."""
    from harness.world import terminate_cleanly

    terminate_cleanly()
    from harness.report.console import print_line, result_console
    from harness.report.schedule_picture import Panel, draw, require_drawing
    from harness.report.schedule_text import print_schedule, title
    from harness.report.terminal import print_failure
    from harness.schedules import case_of, tried

    case = case_of(kind, stages, micro_batches, chunks)
    if plot is not None:
        require_drawing(plot)
    failure = tried(candidate, case, deadline)
    console, verdict = result_console(), failure.verdict
    code, unwritten = 0, None
    try:
        checked: Checked | None = verdict.facts.get("checked")
        if checked is not None:
            print_line(console, f"{title(case)}, of {candidate}")
            print_schedule(console, case, verdict.facts["lists"], checked)
        if verdict.findings:
            code = 2 if verdict.kind == "harness" else 1
            print_failure(console, failure)
        elif verdict.rejected is not None:
            code = 3
            print_line(console, f"nothing to show: the candidate refuses the case: {verdict.rejected}")
        else:
            print_line(console, "all rules hold", "green")
        if plot is not None and checked is not None and checked.run is not None:
            draw(plot, [Panel(title(case), verdict.facts["lists"], checked.run)])
            print_line(console, f"drawn: {plot}")
        elif plot is not None:
            print_line(console, "nothing is drawn: the lists cannot be run to their end")
    except CannotPrint as error:
        unwritten = error
    end(code, unwritten)


@main.command(epilog=EXIT_CODES)
@click.argument("candidate", default="builtin")
@click.option("--mesh", "sizes_of_mesh", default="tp=2,pp=2,dp=2", show_default=True, help="Of the ranks.")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    default=("fp16",),
    show_default=True,
    help="fp32, bf16, fp16 (repeatable, or a list with commas).",
)
@click.option("--steps", default=200, show_default=True)
@click.option("--layers", default=4, show_default=True, help="Of the whole model.")
@click.option("--hidden", default=32, show_default=True, help="Width of the model.")
@click.option("--heads", default=4, show_default=True)
@click.option("--length", default=32, show_default=True, help="Bytes of a sequence.")
@click.option("--batch", default=8, show_default=True, help="Sequences of a step, over all data-parallel ranks.")
@click.option("--micro-batches", default=2, show_default=True, help="Of each data-parallel rank.")
@click.option(
    "--lr",
    type=click.FloatRange(0, min_open=True),
    default=2.0**-9,
    show_default=True,
    help="Learning rate, after a warm-up of 20 steps.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the batches.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw it into FILE (needs matplotlib).")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the curves to FILE.")
@click.option("--deadline", default=60.0, show_default=True, help="Seconds for five steps of the ranks.")
def train(
    candidate: str,
    sizes_of_mesh: str,
    dtypes: tuple[str, ...],
    seed: int,
    plot: Path | None,
    json_file: Path | None,
    deadline: float,
    **sizes: Any,
) -> None:
    """Train a small GPT on Python's own text with CANDIDATE's ranks, and compare every step with one process."""
    from harness.world import terminate_cleanly, warm_up

    terminate_cleanly()
    from harness.find import parse_spec
    from harness.preload import modules

    warm_up(modules([parse_spec(candidate)]))
    from harness.report.console import print_line, result_console
    from harness.report.schedule_picture import require_drawing
    from harness.report.terminal import print_failure
    from harness.report.training_file import write_training
    from harness.report.training_picture import draw_training
    from harness.report.training_progress import TrainingProgress
    from harness.report.training_table import LEGEND, result_text, training_table
    from harness.training.curves import exit_code
    from harness.training.recipe import Sizes, dtypes_of
    from harness.training.runs import failure_of, trained
    from reference.mesh import Mesh
    from reference.text import text

    chosen = dtypes_of(dtypes)
    wanted = Sizes(**sizes)
    if plot is not None:
        require_drawing(plot)
    if json_file is not None:
        _require_writable(json_file)
    try:
        mesh = Mesh.parse(sizes_of_mesh)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    console, lost = result_console(), False
    with TrainingProgress(console, chosen, wanted.steps) as progress:
        runs = trained(candidate, mesh, chosen, wanted, seed=seed, deadline=deadline, listen=progress)
    unwritten = progress.unwritten
    if json_file is not None:
        lost = not write_training(json_file, runs, seed)
    try:
        print_line(console, f"text: {text().described()}")
        for run in runs:
            if run.findings:
                print_line(console, f"{run.dtype}: {result_text(run)}", "bold red")
                print_failure(console, failure_of(run))
        console.print(training_table(runs, mesh.size))
        if any(run.steps for run in runs):
            print_line(console, LEGEND)
        if plot is not None and any(run.steps for run in runs):
            draw_training(plot, runs, f"{mesh.size} ranks, {mesh}")
            print_line(console, f"drawn: {plot}")
        elif plot is not None:
            print_line(console, "nothing is drawn: no step was made")
    except CannotPrint as error:
        unwritten = error
    end(exit_code(runs), unwritten, lost=lost)


@main.command()
def doctor() -> None:
    """Say what is installed, what this machine allows, and whether ranks start."""
    from harness.report.console import result_console
    from harness.report.doctor import print_doctor

    sys.exit(print_doctor(result_console()))


if __name__ == "__main__":
    main()
