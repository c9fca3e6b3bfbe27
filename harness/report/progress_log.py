"""Progress as lines of text, for a log that nobody can redraw."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from harness.events import CaseJudged, Event, Row, SubjectDone, SubjectStarted
from harness.report.console import print_line

_SECONDS = 30.0
_SHARE = 0.1


class ProgressLog:
    """Consumes events. A line when a subject starts, when its first case fails, and when it ends; in between one every
    30 s, unless less than a tenth of the cases has run since the last one."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._asked = self._cases = self._failed = self._told_cases = 0
        self._told_at = clock()

    def __call__(self, event: Event) -> None:
        if isinstance(event, SubjectStarted):
            self._asked, self._cases, self._failed = event.examples, 0, 0
            self._line(event, f"{_examples(event.examples)} to run")
        elif isinstance(event, CaseJudged):
            self._cases += 1
            self._failed += event.failing
            if event.failing and self._failed == 1:
                self._line(event, f"case {self._cases} failed")
            elif self._is_time():
                self._line(event, self._so_far())
        elif isinstance(event, SubjectDone) and event.row.result != "not offered":
            self._line(event.row, row_text(event.row))

    def _is_time(self) -> bool:
        # How many cases shrinking will take nobody knows.
        enough = self._failed > 0 or self._cases - self._told_cases >= _SHARE * self._asked
        return enough and self._clock() - self._told_at >= _SECONDS

    def _so_far(self) -> str:
        if self._failed:
            return f"{self._cases} cases, {self._failed} failed"
        # What a candidate refuses is counted here and not among the examples, so that there may be more.
        return f"{self._cases} cases of {self._asked}" if self._cases <= self._asked else f"{self._cases} cases"

    def _line(self, where: SubjectStarted | CaseJudged | Row, text: str) -> None:
        self._told_at, self._told_cases = self._clock(), self._cases
        print_line(self._console, f"{where.candidate.rpartition('/')[2]} {where.subject}: {text}")


def row_text(row: Row) -> str:
    """A row on one line; the table at the end of the run has the rest."""
    return f"{result_text(row)}, {_examples(row.examples)} in {row.seconds:.1f} s"


def result_text(row: Row) -> str:
    """The result, of a fault with its kinds."""
    kinds = ", ".join(sorted({failure.kind for failure in row.failures}))
    return f"{row.result}: {kinds}" if kinds else row.result


def _examples(count: int) -> str:
    return f"{count} example{'' if count == 1 else 's'}"
