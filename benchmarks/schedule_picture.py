"""GPipe, 1F1B and interleaved 1F1B under each other, on one scale of time.

    python benchmarks/schedule_picture.py                     # docs/schedules.svg

The lists are the shipped ones; the time of each action is from the simulation that checks them. A unit of time is a
forward of a rank's whole part of the model, of which a chunk is a share.
"""

from __future__ import annotations

from pathlib import Path

import click

from harness.report.schedule_picture import Panel, draw, require_drawing
from harness.report.schedule_text import title
from harness.schedules import tried
from reference.schedule import ScheduleCase

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "schedules.svg"


@click.command()
@click.option("--stages", default=4, show_default=True, help="Ranks of the pipeline.")
@click.option("--micro-batches", default=8, show_default=True, help="Of a step.")
@click.option("--chunks", default=2, show_default=True, help="Virtual stages on each rank of the interleaved schedule.")
@click.option("--to", "path", default=str(PICTURE), type=click.Path(path_type=Path))
def main(stages: int, micro_batches: int, chunks: int, path: Path) -> None:
    """Lists, checks and draws."""
    require_drawing(path)
    panels = []
    for kind, of_each in (("gpipe", 1), ("1f1b", 1), ("interleaved", chunks)):
        case = ScheduleCase(kind, stages, micro_batches, of_each)
        verdict = tried("builtin", case, 30.0).verdict
        if not verdict.holds:
            raise click.ClickException(f"{title(case)}: {verdict}")
        checked = verdict.facts["checked"]
        about = f"{title(case)}; idle {checked.run.idle_share}, in flight {list(checked.in_flight)}"
        panels.append(Panel(about, verdict.facts["lists"], checked.run, 1 / of_each))
    draw(path, panels)
    print(f"drawn: {path}")


if __name__ == "__main__":
    main()
