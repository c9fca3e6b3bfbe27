"""Whatever a candidate says can be printed, and means nothing to the terminal or to rich."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from trials import BAD, candidate, line

from harness.case_file import Reproducer
from harness.cli import main
from harness.events import Failure, Row, RunDone
from harness.printable import printable, printable_lines
from harness.report.json_file import write_json
from harness.report.terminal import print_failures, rows_table
from harness.verdict import Finding, Verdict
from harness.verification import verify

#: What the candidates of speaking.py say.
WORDS = "lone \ud800 clear \x1b[2J nul \x00 turned \u202e return \r markup [bold]x[/bold] :warning: [/]"
SHOWN = r"lone \ud800 clear \x1b[2J nul \x00 turned \u202e return \r markup [bold]x[/bold] :warning: [/]"


@given(st.text(st.characters(codec=None)))
def test_every_text_becomes_one_line_that_shows_all_of_it(text: str) -> None:
    shown = printable(text)
    assert len(shown.splitlines()) <= 1
    shown.encode()
    assert printable(shown) == shown
    assert all(c in shown for c in text if c.isprintable())
    assert printable_lines(text).count("\n") == text.count("\n")


@pytest.mark.parametrize("text", ["", "plain", "naïve, 名前", "tab\tand space", "no\u00a0break, wide\u3000space"])
def test_what_shows_as_itself_stays(text: str) -> None:
    assert printable(text) == text


def test_what_does_not_is_escaped() -> None:
    assert printable(WORDS) == SHOWN
    assert printable("a\nb\x85c\u2028d") == r"a\nb\x85c\u2028d"
    assert printable_lines("a\nb\x1b\nc") == "a\nb\\x1b\nc"


def failing(name: str = "mine.py:Mine", **finding: Any) -> Row:
    found = Finding("error", **{"message": WORDS, "cause": WORDS, "details": f"first\n{WORDS}", **finding})
    made = Failure(Reproducer(name, "linear", BAD), Verdict((found,)))
    return Row(name, "linear", "fault", 1, failures=(made,), stopped=WORDS, refusals=((WORDS, 2),))


def test_events_hold_printable_text() -> None:
    row = failing()
    (finding,) = row.failures[0].verdict.findings
    assert (finding.message, finding.cause, finding.details) == (SHOWN, SHOWN, f"first\n{SHOWN}")
    assert (row.stopped, row.refusals) == (SHOWN, ((SHOWN, 2),))
    assert RunDone(1, (row,), 0.0, {"mine.py:Mine": WORDS}).libraries == {"mine.py:Mine": SHOWN}


def test_the_terminal_gets_words_and_no_orders() -> None:
    written = io.StringIO()
    console = Console(file=written, width=2000, force_terminal=True, color_system=None)
    rows = [failing("[red]\x1b[31m:warning:\ud800.py:Mine")]
    print_failures(console, rows)
    console.print(rows_table(rows, {rows[0].candidate: SHOWN}))
    text = written.getvalue()
    text.encode()
    assert "\x1b" not in text
    assert r"error: [red]\x1b[31m:warning:\ud800.py:Mine, linear" in text
    assert text.count(SHOWN) == 6, "message, cause, details, library, why it stopped, what was refused"


def test_what_a_candidate_does_not_offer_is_one_line() -> None:
    written = io.StringIO()
    rows = [Row(name, subject, result) for name in ("a.py:A", "b.py:B") for subject, result in (
        ("mesh", "not offered"), ("linear", "held"), ("embedding", "not offered"))]  # fmt: skip
    Console(file=written, width=200, color_system=None).print(rows_table(rows, {"a.py:A": "A"}))
    lines = [line.split() for line in written.getvalue().splitlines()[1:]]
    assert [line[:2] for line in lines] == [["a.py:A", "A"], ["a.py:A", "not"], ["b.py:B", "linear"], ["b.py:B", "not"]]
    assert [" ".join(line[3:]) for line in lines[1::2]] == ["mesh, embedding"] * 2


def test_strict_parsers_read_the_json(tmp_path: Path) -> None:
    row = failing("\ud800.py:Mine")
    write_json(tmp_path / "run.json", RunDone(1, (row,), 0.0, {row.candidate: WORDS}))
    data = json.loads((tmp_path / "run.json").read_text())
    reproducer = data["rows"][0]["failures"][0].pop("reproducer")
    json.dumps(data, ensure_ascii=False).encode()  # no lone surrogate is in it
    assert data["rows"][0]["failures"][0]["findings"][0]["message"] == SHOWN
    assert reproducer["candidate"] == row.candidate, "what is replayed is exact"


@pytest.mark.parametrize(("name", "code"), [("Raises", 1), ("Refuses", 0), ("Named", 0), ("Unusable", 1)])
def test_no_candidate_can_hide_its_row(name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.world.terminate_cleanly", lambda: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "2000")
    named = candidate(f"speaking.py:{name}")
    result = CliRunner().invoke(
        main, ["verify", named, "--subject", "linear", "--examples", "8", "--max-world", "2", "--seed", "1"]
    )
    assert result.exit_code == code, result.output
    assert SHOWN in result.output
    assert f"speaking.py:{name}" in result.output.splitlines()[-1]


def test_replay_prints_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.world.terminate_cleanly", lambda: None)
    for name, code in (("Raises", 1), ("Refuses", 3)):
        result = CliRunner().invoke(main, ["replay", line(f"speaking.py:{name}")])
        assert result.exit_code == code, result.output
        assert SHOWN in result.output


def test_events_of_a_run_are_printable() -> None:
    heard: list[str] = []
    verify(
        candidate("speaking.py:Named"),
        subjects=["linear"],
        examples=1,
        max_world=1,
        save=None,
        listen=lambda event: heard.append(str(event)),
    )
    assert any(repr(SHOWN)[1:-1] in text for text in heard)
    assert printable("".join(heard)) == "".join(heard)
