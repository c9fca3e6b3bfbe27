"""``shardproof schedule``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.exit_codes import EXIT_CODES, Command, end
from harness.report.streams import CannotPrint

if TYPE_CHECKING:
    from reference.schedule_rules import Checked


@click.command(cls=Command, epilog=EXIT_CODES)
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
