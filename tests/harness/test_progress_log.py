"""Progress as lines: when there is one, what it says, and that a terminal gets none."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable

import pytest
from rich.console import Console
from trials import BAD

from harness.case_file import Reproducer
from harness.events import CaseJudged, Event, Failure, Row, RunStarted, SubjectDone, SubjectStarted
from harness.report.console import ResultConsole
from harness.report.progress_log import ProgressLog
from harness.report.streams import CannotPrint
from harness.report.terminal import TerminalReport
from harness.verdict import Finding, Verdict

NAME = "folder/mine.py:Mine"
STARTED = SubjectStarted(NAME, "linear", 100)
HELD, FAILED = CaseJudged(NAME, "linear", False), CaseJudged(NAME, "linear", True)
FAILURE = Failure(Reproducer(NAME, "linear", BAD), Verdict((Finding("mismatch", "wrong"),)))


class Log:
    """A log whose time is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.file = io.StringIO()
        self.tell = ProgressLog(Console(file=self.file, width=200), lambda: self.now)

    def cases(self, count: int, seconds: float, event: Event = HELD) -> None:
        """So many cases, each of so many seconds."""
        for _ in range(count):
            self.now += seconds
            self.tell(event)

    @property
    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()


@pytest.fixture
def log() -> Log:
    made = Log()
    made.tell(STARTED)
    return made


def test_a_short_run_has_a_line_at_each_end(log: Log) -> None:
    log.cases(100, 0.05)
    log.tell(SubjectDone(Row(NAME, "linear", "held", examples=100, meshes=60, seconds=5.0)))
    assert log.lines == ["mine.py:Mine linear: 100 examples to run", "mine.py:Mine linear: held, 100 examples in 5.0 s"]


def test_of_a_tenth_and_half_a_minute_the_rarer_decides(log: Log) -> None:
    log.cases(100, 1.0)  # a tenth takes 10 s
    assert log.lines[1:] == [f"mine.py:Mine linear: {n} cases of 100" for n in (30, 60, 90)]
    log.tell(STARTED)
    log.cases(100, 6.0)  # and here a minute
    assert log.lines[5:] == [f"mine.py:Mine linear: {n} cases of 100" for n in range(10, 101, 10)]


def test_more_cases_than_were_asked_for_have_no_share(log: Log) -> None:
    log.cases(160, 0.5)
    assert log.lines[1:] == ["mine.py:Mine linear: 60 cases of 100", "mine.py:Mine linear: 120 cases"]


def test_the_first_failure_is_told_at_once_and_shrinking_every_half_minute(log: Log) -> None:
    log.cases(3, 0.1)
    log.cases(1, 0.1, FAILED)
    log.cases(2, 20.0, FAILED)
    log.cases(1, 20.0)
    log.tell(SubjectDone(Row(NAME, "linear", "fault", examples=7, seconds=60.4, failures=(FAILURE,))))
    assert log.lines[1:] == [
        "mine.py:Mine linear: case 4 failed",
        "mine.py:Mine linear: 6 cases, 3 failed",
        "mine.py:Mine linear: fault: mismatch, 7 examples in 60.4 s",
    ]


def test_what_is_not_offered_is_left_to_the_table(log: Log) -> None:
    log.tell(SubjectDone(Row(NAME, "mesh", "not offered")))
    log.tell(SubjectDone(Row(NAME, "mesh", "nothing ran")))
    log.tell(SubjectDone(Row(NAME, "linear", "held", examples=1, seconds=2.0)))
    assert log.lines[1:] == [
        "mine.py:Mine mesh: nothing ran, 0 examples in 0.0 s",
        "mine.py:Mine linear: held, 1 example in 2.0 s",
    ]


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_log_that_cannot_be_written_does_not_end_the_run() -> None:
    with TerminalReport(ResultConsole(file=Full(), width=200)) as report:
        for event in (RunStarted(1, (NAME,), ("linear",), 100, 8), STARTED, HELD, FAILED):
            report(event)
    assert isinstance(report.unwritten, CannotPrint)


def test_a_terminal_gets_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(is_terminal: Callable[[], bool]) -> list[str]:
        file = io.StringIO()
        monkeypatch.setattr(file, "isatty", is_terminal)
        with TerminalReport(Console(file=file, width=200, color_system=None)) as report:
            for event in (RunStarted(1, (NAME,), ("linear",), 100, 8), STARTED, HELD):
                report(event)
        return file.getvalue().splitlines()

    assert printed(lambda: True) == ["seed 1"]
    assert printed(lambda: False) == ["seed 1", "mine.py:Mine linear: 100 examples to run"]
