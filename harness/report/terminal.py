"""The run as text: progress, every failure in full, and a table of rows."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from harness.events import (
    CandidateDescribed,
    CaseJudged,
    Event,
    Failure,
    Listener,
    Row,
    RunDone,
    RunStarted,
    SubjectDone,
    SubjectStarted,
)
from harness.printable import printable
from harness.report.console import plain, print_line
from harness.report.progress_log import ProgressLog, result_text
from harness.report.streams import CannotPrint
from harness.verdict import Finding

_STYLES = {"held": "green", "fault": "bold red", "not offered": "dim", "nothing ran": "yellow"}
_MOST_FINDINGS = 4
_MOST_DETAIL_LINES = 40


class TerminalReport:
    """Consumes events. Results go to ``console``; the progress bar goes to stderr and only to a terminal. Where
    ``console`` is none, progress goes there as lines, so that the log of a CI job is not silent for minutes.

    ``unwritten``: why results could not be written. The run goes on: its exit code and its files are results too.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.unwritten: CannotPrint | None = None
        self._consumers: list[Listener] = [self._tell]
        if not console.file.isatty():
            self._consumers.append(ProgressLog(console))
        self._libraries: dict[str, str] = {}
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not Console(stderr=True).is_terminal,
        )

    def __enter__(self) -> TerminalReport:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        for consume in self._consumers:
            try:
                consume(event)
            except CannotPrint as error:
                self.unwritten = error

    def _tell(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            print_line(self.console, f"seed {event.seed}")
        elif isinstance(event, CandidateDescribed):
            self._libraries[event.candidate] = event.library
        elif isinstance(event, SubjectStarted):
            self._title = printable(f"{event.candidate} {event.subject}")
            self._task = self._progress.add_task(self._title, total=event.examples)
        elif isinstance(event, CaseJudged):
            self._progress.advance(self._task)
            if event.failing:
                self._progress.update(self._task, description=f"{self._title}: shrinking", total=None)
        elif isinstance(event, SubjectDone):
            for task in list(self._progress.task_ids):
                self._progress.remove_task(task)
        elif isinstance(event, RunDone):
            self._progress.stop()
            print_failures(self.console, event.rows)
            self.console.print(rows_table(event.rows, self._libraries))


def rows_table(rows: Sequence[Row], libraries: dict[str, str]) -> Table:
    """One line for each subject that a candidate offers, and one for those that it does not."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("candidate", "library", "subject", "result"):
        table.add_column(column, overflow="fold")
    for column in ("examples", "meshes", "time"):
        table.add_column(column, justify="right")
    table.add_column("note", overflow="fold")
    for name in dict.fromkeys(row.candidate for row in rows):
        own = [row for row in rows if row.candidate == name]
        candidate = plain(name.rpartition("/")[2])  # of a file its name; the failures name it in full
        lacking = [row.subject for row in own if row.result == "not offered"]
        for row in own:
            if row.result != "not offered":
                table.add_row(
                    candidate,
                    plain(libraries.get(name, "")),
                    row.subject,
                    plain(result_text(row), _STYLES[row.result]),
                    str(row.examples),
                    str(row.meshes),
                    f"{row.seconds:.1f} s",
                    Text(_note(row)),
                )
        if lacking:
            result = Text("not offered", _STYLES["not offered"])
            table.add_row(candidate, Text(), "", result, "", "", "", Text(", ".join(lacking)))
    return table


def _note(row: Row) -> str:
    """Why it is as it is, and what the candidate refused: refused cases are no passed ones."""
    if row.found_after is not None:
        found = f"found after {row.found_after} example{'s' if row.found_after > 1 else ''}"
        return "\n".join([found, *([row.stopped] if row.stopped else [])])
    refused = [f"refused {times}: {why}" for why, times in row.refusals] if row.examples else []
    near = f"in {row.left_open} some values near overflow were left open"
    return "\n".join([*([row.stopped] if row.stopped else []), *refused, *([near] if row.left_open else [])])


def print_failures(console: Console, rows: Sequence[Row]) -> None:
    """Every failure once; rows of one unusable candidate share theirs."""
    seen: set[tuple[str, str]] = set()
    for row in rows:
        for failure in row.failures:
            key = (row.candidate, failure.verdict.findings[0].message)
            if failure.reproducer.case is None and key in seen:
                continue
            seen.add(key)
            print_failure(console, failure)


def print_failure(console: Console, failure: Failure) -> None:
    """What is wrong, where, and how to see it again."""

    def line(text: str) -> None:
        print_line(console, text)

    made = failure.reproducer
    title = made.candidate if made.case is None else f"{made.candidate}, {made.subject}"
    print_line(console, f"{failure.kind}: {title}", "bold red")
    findings = causes_first(failure.verdict.findings)
    for finding in findings[:_MOST_FINDINGS]:
        for text in finding_lines(finding):
            line(f"  {text}")
    hidden = len(findings) - _MOST_FINDINGS
    if hidden > 0:
        line(f"  and {hidden} more findings")
    if made.case is not None:
        line(f"  case: {made.line()}")
        line(f"  replay: shardproof replay {shlex.quote(made.line())}")
    if failure.saved is not None:
        line(f"  saved: {failure.saved}")
    if failure.not_saved is not None:
        line(f"  not saved: {failure.not_saved}")
    line("")


def causes_first(findings: Sequence[Finding]) -> list[Finding]:
    """Side effects before the rest, gravest first: an input that was changed explains what is wrong after it."""
    return sorted(findings, key=lambda finding: finding.kind != "side-effect")


def finding_lines(finding: Finding) -> list[str]:
    """One finding as lines of text."""
    lines = [finding.message]
    if finding.index is not None:
        lines.append(
            f"  {finding.place}: first wrong element {_index(finding.index)} of {finding.tensor} "
            f"(local {_index(finding.local_index or ())}): got {finding.got!r}, want {finding.want!r}"
            + ("" if finding.tolerance is None else f", tolerance {finding.tolerance:.3g}")
        )
    if finding.cause is not None:
        lines.append(f"  cause: {finding.cause}")
    details = finding.details.splitlines()
    lines += [f"  {text}" for text in details[:_MOST_DETAIL_LINES]]
    if len(details) > _MOST_DETAIL_LINES:
        lines.append(f"  ({len(details) - _MOST_DETAIL_LINES} more lines)")
    return lines


def _index(index: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, index)) + "]"
