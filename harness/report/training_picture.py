"""Trainings as a picture: a column for each dtype; under each other the losses, their difference against its tolerance,
and the loss scale with the steps that were skipped. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.report.schedule_picture import CannotDraw
from harness.training.curves import Step, Trained

_PROCESS, _RANKS, _TOLERANCE, _WRONG = "#08306b", "#fd8d3c", "#b5b5b5", "#cb181d"
#: What is drawn of a difference of zero, in parts of the smallest other number.
_BELOW = 0.5


def draw_training(path: Path, runs: Sequence[Trained], ranks: str) -> None:
    """Draws those that have steps. ranks: what the ranks are called, as in "tp=2, dp=2". Raises CannotDraw."""
    import matplotlib
    from matplotlib.figure import Figure

    shown = [run for run in runs if run.steps]
    if not shown:
        raise CannotDraw(f"nothing is drawn into --plot {path}: no step was made")
    look: dict[Any, Any] = {"svg.hashsalt": "shardproof", "svg.fonttype": "none", "font.size": 8, "axes.linewidth": 0.6}
    with matplotlib.rc_context({**look, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.6 * len(shown) + 0.4, 6.0), layout="constrained")
        rows = figure.subplots(
            3, len(shown), squeeze=False, sharex="col", sharey="row", gridspec_kw={"height_ratios": (3, 3, 2)}
        )
        marked = [i for i, run in enumerate(shown) if any(one.skipped or not one.decided for one in run.steps)]
        for column, run in enumerate(shown):
            _losses(rows[0, column], run, ranks)
            _differences(rows[1, column], run)
            _scales(rows[2, column], run)
            for row in rows[:, column]:
                # That of the marks stands where there are some.
                legend = column == 0 if row is not rows[2, column] else column in marked
                row.grid(alpha=0.25, linewidth=0.5)
                if run.wrong_at is not None:
                    row.axvline(run.wrong_at, color=_WRONG, linewidth=0.8, linestyle=":")
                if legend:
                    row.legend(frameon=False, fontsize=7, loc="best")
        for row, label in zip(
            rows[:, 0], ("loss (nats a byte)", "difference of the losses", "loss scale"), strict=True
        ):
            row.set_ylabel(label)
        for one in rows[2]:
            one.set_xlabel("step")
        try:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise CannotDraw(f"cannot write --plot {path}: {error.strerror}") from error


def _losses(axes: Any, run: Trained, ranks: str) -> None:
    steps = run.steps
    numbers = [one.step for one in steps]
    axes.plot(numbers, [one.loss.process for one in steps], color=_PROCESS, linewidth=2.2, label="one process")
    axes.plot(numbers, [one.loss.ranks for one in steps], color=_RANKS, linewidth=0.9, label=ranks)
    said = "held" if run.held else "ended" if run.wrong_at is None else f"wrong from step {run.wrong_at} on"
    axes.set_title(f"{run.dtype}: {said}", loc="left", fontsize=9, color="black" if run.held else _WRONG)


def _differences(axes: Any, run: Trained) -> None:
    """On a logarithmic axis; a difference of zero lies below all others."""
    steps = run.steps
    numbers = [one.step for one in steps]
    found = [_finite(one.loss.difference) for one in steps]
    limits = [_finite(one.loss.tolerance) for one in steps]
    least = min((x for x in (*found, *limits) if x > 0), default=1.0) * _BELOW
    axes.set_yscale("log")
    axes.plot(numbers, [max(x, least) for x in limits], color="#7a7a7a", linewidth=1.0, label="tolerance, computed")
    axes.fill_between(numbers, least, [max(x, least) for x in limits], color=_TOLERANCE, alpha=0.25, linewidth=0)
    dots = {"linestyle": "none", "marker": "o", "markersize": 2.2}
    axes.plot(numbers, [max(x, least) for x in found], color=_PROCESS, label="one process to ranks", **dots)
    looks = [(one.step, one.loss) for one in run.looks if one.loss is not None]
    if looks:
        at = [step for step, _ in looks]
        dashes = {"linestyle": "none", "marker": "_", "markersize": 6, "markeredgewidth": 1.3}
        again = [max(_finite(loss.tolerance), least) for _, loss in looks]
        axes.plot(at, again, color=_RANKS, label="tolerance, from the ranks' own state", **dashes)
        found_again = [max(_finite(loss.difference), least) for _, loss in looks]
        axes.plot(at, found_again, color=_RANKS, label="the same step from their state", **dots)
    beyond = [(n, x) for n, x, one in zip(numbers, found, steps, strict=True) if one.loss.share > 1]
    if beyond:
        axes.plot(*zip(*beyond, strict=True), color=_WRONG, label="beyond its tolerance", **dots)


def _finite(x: float) -> float:
    return x if math.isfinite(x) else math.nan


def _scales(axes: Any, run: Trained) -> None:
    steps = run.steps
    axes.set_yscale("log", base=2)
    axes.step([one.step for one in steps], [one.scale for one in steps], where="mid", color=_RANKS, linewidth=1.2)
    marks: dict[str, tuple[list[Step], dict[str, Any]]] = {
        "skipped": ([one for one in steps if one.skipped and one.decided], {"color": _WRONG}),
        "skipped, rounding decided": (
            [one for one in steps if one.skipped and not one.decided],
            {"color": _WRONG, "markerfacecolor": "white"},
        ),
        "made, rounding decided": (
            [one for one in steps if not one.skipped and not one.decided],
            {"color": _PROCESS, "markerfacecolor": "white"},
        ),
    }
    for label, (some, style) in marks.items():
        if some:
            at = [one.step for one in some], [one.scale for one in some]
            axes.plot(*at, linestyle="none", marker="o", markersize=3.5, markeredgewidth=0.8, label=label, **style)
