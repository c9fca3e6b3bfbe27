"""``shardproof train``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness.commands.output import require_writable
from harness.exit_codes import EXIT_CODES, Command, end
from harness.report.streams import CannotPrint


@click.command(cls=Command, epilog=EXIT_CODES)
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
        require_writable(json_file)
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
