"""A schedule as text: a row a rank, a cell a unit of time, and what was measured beside the formulas."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.report.console import print_line
from reference.schedule import BI, BW, B, F, Lists, ScheduleCase
from reference.schedule_formulas import EXACT, idle_share, most_in_flight, place_of, span
from reference.schedule_rules import Checked, say
from reference.schedule_run import UNITS, Run, rendezvous
from reference.schedule_tables import Tables

_MOST_RANKS = 64
_LETTERS = {F: "F", B: "B", BI: "I", BW: "W"}
_WORDS = {F: "F forward", B: "B backward", BI: "I backward to the input", BW: "W backward to the weights"}
#: Of even and of odd chunks.
_STYLES = {
    F: ("black on cyan", "black on bright_cyan"),
    B: ("black on green", "black on bright_green"),
    BI: ("black on green", "black on bright_green"),
    BW: ("black on yellow", "black on bright_yellow"),
}


def print_schedule(console: Console, case: ScheduleCase, lists: Lists, checked: Checked) -> None:
    """Prints the schedule, and under it in flight and idle share; nothing where it does not run to its end."""
    if checked.run is None or checked.in_flight is None:
        return
    _print_time(console, lists, checked.run)
    _print_ranks(console, case, lists, checked.in_flight, checked.run)
    units, expected = f"{checked.run.span} units of time", span(case, UNITS.forward, UNITS.backward)
    bound = "formula" if case.kind in EXACT else "whole backwards"
    print_line(console, f"idle share {say(checked.run.idle_share)}, {bound} {say(idle_share(case))}")
    print_line(console, f"{units}, {bound} {expected}; {UNITS}")
    if lists.receives == "wait":
        stuck = rendezvous(Tables.of(lists))
        holds = "it comes to its end too" if stuck is None else stuck.message
        print_line(console, f"where sends wait for their receives: {holds}")
    elif lists.receives == "none":
        print_line(console, "the lists say only what is computed, and name no messages")


def title(case: ScheduleCase) -> str:
    """``1f1b: 4 ranks, 8 micro-batches``."""
    chunks = f", {case.chunks} chunks on each" if case.chunks > 1 else ""
    counts = [(case.stages, "rank"), (case.micro_batches, "micro-batch")]
    ranks, micro_batches = (f"{n} {name}{'' if n == 1 else 'es' if name.endswith('h') else 's'}" for n, name in counts)
    return f"{case.kind}: {ranks}{chunks}, {micro_batches}"


def label(kind: int, micro_batch: int, chunk: int, chunks: int) -> str:
    """``F3``, or ``F3b`` for the second of several chunks."""
    letter = "" if chunks == 1 else chr(ord("a") + chunk) if chunks <= 26 else f".{chunk}"
    return f"{_LETTERS[kind]}{micro_batch}{letter}"


def _print_time(console: Console, lists: Lists, run: Run) -> None:
    ranks = min(lists.ranks, _MOST_RANKS)
    margin = len(f"rank {ranks - 1} ")
    room = max(1, console.width - margin)
    shown = {kind for actions in lists.actions[:ranks] for kind in actions[:, 0].tolist()}
    widest = max(
        len(label(kind, k, chunk, lists.chunks))
        for actions in lists.actions
        for kind, chunk, k in actions.tolist()
        if kind in _LETTERS
    )
    width = widest + 1
    if run.span * width > room:
        width = 1
    units = min(run.span, room // width)
    for rank in range(ranks):
        line = Text(f"rank {rank}".ljust(margin))
        line.append_text(_row(lists, run, rank, width, units))
        console.print(line, soft_wrap=True)
    if lists.ranks > ranks:
        print_line(console, f"and {lists.ranks - ranks} more ranks")
    legend = [text for kind, text in _WORDS.items() if kind in shown]
    chunks = f"; {'a, b, ...' if lists.chunks > 2 else 'a, b'}: chunks" if 1 < lists.chunks <= 26 and width > 1 else ""
    print_line(console, f"{', '.join(legend)} of a micro-batch, =: goes on, .: idle{chunks}", "dim")
    if width == 1:
        wanted = run.span * (widest + 1) + margin
        print_line(console, f"one character a unit of time: with micro-batches it would take {wanted} columns", "dim")
    if units < run.span:
        print_line(console, f"cut after {units} of {run.span} units of time: the terminal is too narrow", "dim")


def _row(lists: Lists, run: Run, rank: int, width: int, units: int) -> Text:
    row, now = Text(), 0
    for (kind, chunk, k), start, end in zip(
        lists.actions[rank].tolist(), run.start[rank].tolist(), run.end[rank].tolist(), strict=True
    ):
        if kind not in _LETTERS:
            continue
        if start >= units:
            break
        row.append(".".ljust(width) * (start - now), "dim")
        now, end = end, min(end, units)
        if width == 1:
            text = _LETTERS[kind] + "=" * (end - start - 1)
        else:
            name = label(kind, k, chunk, lists.chunks)
            text = name.ljust(width) + ("=" * (width - 1) + " ") * (end - start - 1)
        style = _STYLES[kind][chunk % 2]
        row.append(text[:-1], style)
        row.append(text[-1:], style if width == 1 else "")
    row.append(".".ljust(width) * (units - min(now, units)), "dim")
    return row


def _print_ranks(console: Console, case: ScheduleCase, lists: Lists, in_flight: tuple[int, ...], run: Run) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("rank", "most in flight", "formula", "busy", "idle"):
        table.add_column(column, justify="right")
    for rank, (most, busy) in enumerate(zip(in_flight[:_MOST_RANKS], run.busy, strict=False)):
        formula = most_in_flight(case, place_of(case, lists.placement[rank]))
        table.add_row(str(rank), str(most), "" if formula is None else str(formula), str(busy), str(run.span - busy))
    console.print(table)
