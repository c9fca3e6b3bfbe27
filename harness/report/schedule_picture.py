"""Schedules as a picture: a row a rank, time to the right, one box for each forward and backward. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import WrongUse
from harness.report.schedule_text import label
from reference.schedule import BI, BW, B, F, Lists
from reference.schedule_run import Run

#: Lighter and darker for the first and the last chunk; backwards are hatched, to be told apart without colours.
_BLUE, _GREEN, _YELLOW = ("#c6dbef", "#6baed6"), ("#c7e9c0", "#74c476"), ("#fff0b3", "#fec44f")
_COLOURS = {F: _BLUE, B: _GREEN, BI: _GREEN, BW: _YELLOW}
_NAMES = {F: "forward", B: "backward", BI: "backward to the input", BW: "backward to the weights"}
#: Boxes narrower than so many inches have no text.
_READABLE = 0.13


@dataclass(frozen=True, eq=False)
class Panel:
    """One schedule. unit: how long one unit of its run is drawn; with v chunks, a chunk is 1/v of a rank's work."""

    title: str
    lists: Lists
    run: Run
    unit: float = 1.0


class CannotDraw(WrongUse):
    """A picture that cannot be made, or not be written; the message says why."""


def require_drawing(path: Path) -> None:
    """Raises CannotDraw, before anything is computed, without matplotlib or for a file that cannot be."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise CannotDraw("--plot needs matplotlib, which is not installed here: pip install matplotlib") from error
    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".") not in kinds:
        raise CannotDraw(f"--plot {path}: expected a file of a known kind: {', '.join(f'.{kind}' for kind in kinds)}")
    if not path.absolute().parent.is_dir():
        raise CannotDraw(f"--plot {path}: there is no folder {path.absolute().parent}")


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Draws the schedules under each other, each with its title, on one scale of time. Raises CannotDraw."""
    import matplotlib
    from matplotlib.figure import Figure

    longest = max(panel.run.span * panel.unit for panel in panels)
    width = min(16.0, max(6.0, max(0.22 * panel.run.span for panel in panels)))
    heights = [0.24 * panel.lists.ranks + 0.6 for panel in panels]
    with matplotlib.rc_context(
        {"svg.hashsalt": "shardproof", "svg.fonttype": "none", "font.size": 8, "hatch.linewidth": 0.5}
    ):
        figure = Figure(figsize=(width, min(40.0, sum(heights) + 0.4)), layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
        for one, panel in zip(axes, panels, strict=True):
            _draw_one(one, panel, longest, width)
        axes[-1].set_xlabel("units of time")
        try:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise CannotDraw(f"cannot write --plot {path}: {error.strerror}") from error


def _draw_one(axes: Any, panel: Panel, longest: float, width: float) -> None:
    from matplotlib.patches import Patch

    lists, run, unit = panel.lists, panel.run, panel.unit
    inch = 0.9 * width / longest
    seen: dict[tuple[int, int], Patch] = {}
    for rank, (actions, starts, ends) in enumerate(zip(lists.actions, run.start, run.end, strict=True)):
        for (kind, chunk, k), start, end in zip(actions.tolist(), starts.tolist(), ends.tolist(), strict=True):
            if kind not in _COLOURS or start == end:
                continue
            colour, hatch = _colour(kind, chunk, lists.chunks), "" if kind == F else "////"
            look: dict[str, Any] = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.4, "hatch": hatch}
            axes.barh(rank, unit * (end - start), left=unit * start, height=0.9, **look)
            seen.setdefault((kind, chunk), Patch(label=_legend(kind, chunk, lists.chunks), **look))
            text = label(kind, k, chunk, 1)[1:]
            if inch * unit * (end - start) > _READABLE * max(1, len(text)) / 1.5:
                style = {"fontsize": 6.5, "va": "center", "ha": "center"}
                axes.text(unit * (start + end) / 2, rank, text, **style)
    axes.set(xlim=(0, longest), ylim=(lists.ranks - 0.45, -0.55), ylabel="rank")
    axes.set_title(panel.title, loc="left", fontsize=8)
    axes.set_yticks(range(0, lists.ranks, max(1, lists.ranks // 16)))
    axes.set_facecolor("#f4f4f4")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles = [seen[key] for key in sorted(seen)]
    axes.legend(handles=handles[:8], loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=6.5, frameon=False)


def _colour(kind: int, chunk: int, chunks: int) -> str:
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    share = chunk / (chunks - 1) if chunks > 1 else 0.0
    return str(to_hex(LinearSegmentedColormap.from_list("chunks", _COLOURS[kind])(share)))


def _legend(kind: int, chunk: int, chunks: int) -> str:
    return _NAMES[kind] + (f", chunk {chunk}" if chunks > 1 else "")
