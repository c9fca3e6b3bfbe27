"""What came of trainings, as a table: a row for each dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from harness.report.console import plain
from harness.training.curves import Number, Step, Trained

#: What the columns of shares mean.
LEGEND = (
    "off: the largest difference over its computed tolerance, 1 is the limit; same state: of all that ranks keep, "
    "after a step from their own state; undecided: rounding decides whether the step overflows"
)


def training_table(runs: Sequence[Trained], ranks: int) -> Table:
    """Losses of one process and of the ranks, skipped steps, and the largest differences over their tolerances."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    many = f"{ranks} rank{'s' * (ranks > 1)}"
    table.add_column("dtype")
    for column in (
        "steps", "loss, one process", f"loss, {many}", "skipped", "undecided", "loss off", "norm off", "same state off",
    ):  # fmt: skip
        table.add_column(column, justify="right", overflow="fold")
    table.add_column("result", overflow="fold")
    for run in runs:
        table.add_row(*_cells(run), plain(result_text(run), "green" if run.held else "bold red"))
    return table


def _cells(run: Trained) -> list[str]:
    steps = run.steps
    if not steps:
        return [run.dtype, "0", *[""] * 7]
    skips = f"{sum(one.process_skipped for one in steps)} / {sum(one.skipped for one in steps)}"
    losses = [(one.step, one.loss) for one in steps]
    norms = [(one.step, one.norm) for one in steps if one.norm is not None]
    looks = [(one.share, one.step) for one in run.looks]
    return [
        run.dtype, str(len(steps)), *(_ends(steps, ranks) for ranks in (False, True)), skips, str(run.undecided),
        _largest(losses), _largest(norms), _share(*max(looks)) if looks else "not seen" if run.no_looks else "",
    ]  # fmt: skip


def _ends(steps: Sequence[Step], ranks: bool) -> str:
    first, last = (one.loss.ranks if ranks else one.loss.process for one in (steps[0], steps[-1]))
    return f"{first:.4f} to {last:.4f}"


def _largest(numbers: Sequence[tuple[int, Number]]) -> str:
    """The largest share of a tolerance, and its step."""
    found = [(number.share if not math.isnan(number.share) else math.inf, step) for step, number in numbers]
    return _share(*max(found)) if found else ""


def _share(share: float, step: int) -> str:
    return f"{share:.2g} (step {step})"


def result_text(run: Trained) -> str:
    """The verdict in some words."""
    if run.refused is not None:
        return f"nothing ran: {run.refused}"
    if run.held:
        return "held"
    at = "" if run.wrong_at is None else f" at step {run.wrong_at}"
    return f"fault: {run.findings[0].kind}{at}"
