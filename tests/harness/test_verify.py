"""The main job in one process: rows, events, exit codes; a bad candidate does not keep the next one from running."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest
from trials import candidate

from harness.bench import Bench
from harness.case_file import Reproducer, read
from harness.errors import WrongUse
from harness.events import Event, Failure, Row, RunDone, RunStarted, SubjectDone
from harness.find import UnknownCandidate
from harness.properties import PROPERTIES
from harness.report.json_file import write_json
from harness.report.terminal import finding_lines
from harness.verdict import Finding, Verdict
from harness.verification import WorldTooLarge, exit_code, verify


def run(*names: str, **options: Any) -> RunDone:
    options = {"subjects": ["linear"], "examples": 4, "max_world": 2, "seed": 1, "save": None, **options}
    return verify(*(candidate(name) for name in names), **options)


def results(done: RunDone) -> list[str]:
    return [row.result for row in done.rows]


def test_a_bad_candidate_does_not_keep_the_next_from_running(tmp_path: Path) -> None:
    events: list[Event] = []
    names = ("raising_on_import.py:Mine", "dying_on_import.py:Mine", "raising.py:InBuild", "right.py:Right")
    done = run(*names, examples=6, listen=events.append, save=tmp_path / "new" / "folder")
    assert results(done) == ["fault", "fault", "fault", "held"]
    assert [row.failures[0].kind for row in done.rows[:3]] == ["error", "crash", "error"]
    assert exit_code(done.rows) == 1
    assert isinstance(events[0], RunStarted)
    assert events[0].seed == done.seed == 1
    assert isinstance(events[-1], RunDone)
    assert [event.row for event in events if isinstance(event, SubjectDone)] == list(done.rows)
    unusable, built = done.rows[0].failures[0], done.rows[2].failures[0]
    assert unusable.saved is None, "there is no case to save"
    assert built.saved is not None
    assert read(built.saved) == built.reproducer
    assert [str(p) for p in (tmp_path / "new" / "folder").iterdir()] == [built.saved]
    assert done.rows[3].examples == 6

    write_json(tmp_path / "run.json", done)
    data = json.loads((tmp_path / "run.json").read_text())
    assert (data["seed"], data["exit_code"]) == (1, 1)
    assert [row["result"] for row in data["rows"]] == results(done)
    (failure,) = data["rows"][2]["failures"]
    assert read(json.dumps(failure["reproducer"])) == built.reproducer
    assert (failure["kind"], failure["saved"], failure["history"]) == ("error", built.saved, [])
    assert failure["findings"][0]["message"].startswith("the candidate raised in build on rank 0: KeyError")
    assert data["rows"][0]["failures"][0]["reproducer"] is None


def test_a_failure_that_cannot_be_saved_is_still_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Reproducer, "save", full)
    done = run("returning.py:NaN", "right.py:Right", examples=8, save=tmp_path)
    assert results(done) == ["fault", "held"]
    (failure,) = done.rows[0].failures
    assert (failure.kind, failure.saved) == ("mismatch", None)
    assert failure.not_saved == "[Errno 28] No space left on device"
    assert exit_code(done.rows) == 1
    write_json(tmp_path / "run.json", done)
    (written,) = json.loads((tmp_path / "run.json").read_text())["rows"][0]["failures"]
    assert (written["saved"], written["not_saved"]) == (None, failure.not_saved)


def test_the_file_of_a_flaky_failure_has_every_case_before_it(tmp_path: Path) -> None:
    done = run("flaky.py:SecondCase", examples=15, save=tmp_path)
    for failure in done.rows[0].failures:
        assert failure.kind == "flaky"
        assert failure.saved is not None
        assert json.loads(Path(failure.saved).read_text())["history"] == list(failure.history)


def test_numbers_travel_exactly_in_json(tmp_path: Path) -> None:
    done = run("returning.py:NaN", examples=40)
    write_json(tmp_path / "run.json", done)
    finding = json.loads((tmp_path / "run.json").read_text())["rows"][0]["failures"][0]["findings"][0]
    assert finding["got"] == "nan"
    assert isinstance(float(finding["want"]), float)
    assert finding["tensor"] == "output[0]"


def test_a_tolerance_and_a_cause_are_told(tmp_path: Path) -> None:
    found = Finding(
        "mismatch", "wrong", 0, "rank 0", "output[0]", (0,), (0,), 1.5, 1.0, tolerance=float("inf"), cause="added twice"
    )
    assert finding_lines(found) == [
        "wrong",
        "  rank 0: first wrong element [0] of output[0] (local [0]): got 1.5, want 1.0, tolerance inf",
        "  cause: added twice",
    ]
    failure = Failure(Reproducer("mine.py:Mine", "linear", None), Verdict((found,)))
    write_json(tmp_path / "run.json", RunDone(1, (Row("mine.py:Mine", "linear", "fault", failures=(failure,)),), 0.0))
    (written,) = json.loads((tmp_path / "run.json").read_text())["rows"][0]["failures"][0]["findings"]
    assert (written["tolerance"], written["cause"]) == ("inf", "added twice")


def test_our_own_fault_has_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: object) -> Any:
        raise ZeroDivisionError

    monkeypatch.setitem(PROPERTIES, "linear", dataclasses.replace(PROPERTIES["linear"], expected=broken))  # type: ignore[arg-type]
    done = run("right.py:Right")
    assert done.rows[0].failures[0].kind == "harness"
    assert exit_code(done.rows) == 2


@pytest.mark.parametrize(
    ("results", "kinds", "code"),
    [
        (["held", "held"], [], 0),
        (["held", "not offered"], [], 0),
        (["not offered"], [], 3),
        (["nothing ran"], [], 3),
        (["held", "nothing ran"], [], 3),
        ([], [], 3),
        (["held", "fault"], ["flaky"], 1),
        (["held", "fault"], ["harness"], 2),
        (["nothing ran", "fault", "fault"], ["harness", "hang"], 1),
    ],
)
def test_exit_codes(results: list[Any], kinds: list[str], code: int) -> None:
    class Failed:
        def __init__(self, kind: str) -> None:
            self.kind = kind

    rows = [Row("mine", "linear", result) for result in results if result != "fault"]
    rows += [Row("mine", "linear", "fault", failures=(Failed(kind),)) for kind in kinds]  # type: ignore[arg-type]
    assert exit_code(rows) == code


def test_only_the_dtypes_asked_for_are_drawn() -> None:
    done = run("declaring.py:HalfOnly", "raising.py:InForward", dtypes=["bf16", "fp64"], examples=8)
    half, other = done.rows
    assert (half.result, half.examples) == ("nothing ran", 0)
    assert half.stopped == "the candidate has only fp16"
    assert other.failures[0].reproducer.case.dtype in ("bf16", "fp64")


def test_a_subject_that_is_asked_for_and_not_offered_is_not_green() -> None:
    offered = {row.subject: row.result for row in run("right.py:Right", subjects=None).rows}
    assert offered == {subject: "held" if subject == "linear" else "not offered" for subject in PROPERTIES}
    done = run("right.py:Right", subjects=["mesh", "linear"])
    assert results(done) == ["nothing ran", "held"]
    assert done.rows[0].stopped == "the candidate defines none of group, group_ranks"
    assert exit_code(done.rows) == 3


def test_the_time_budget_is_for_the_whole_run() -> None:
    done = run("right.py:Right", examples=100_000, time_budget=1.0)
    assert done.seconds < 30
    assert "the time budget" in str(done.rows[0].stopped)


def test_a_seed_is_drawn_and_told() -> None:
    seeds = {run("right.py:Right", seed=None, examples=1).seed for _ in range(2)}
    assert len(seeds) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subjects": ["lineal"]}, "unknown subject 'lineal': expected one of mesh, collectives"),
        ({"dtypes": ["fp8"]}, "unknown dtype 'fp8': expected one of fp32, fp64, bf16, fp16"),
        ({"examples": 0}, "examples is 0: expected at least 1"),
        ({"seed": -1}, "seed is -1: expected at least 0"),
        ({"max_world": 0}, "max_world is 0: expected at least 1"),
        ({"max_world": 10**6}, "a world of 1000000 ranks is more than this machine allows: at most "),
        ({"time_budget": 0.0}, "time_budget is 0.0: expected seconds above 0"),
        ({"time_budget": float("nan")}, "time_budget is nan: expected seconds above 0"),
        ({"deadline": 0.0}, "deadline is 0.0: expected seconds above 0"),
        ({"deadline": float("nan")}, "deadline is nan: expected seconds above 0"),
        ({"save": "/dev/null/folder"}, "cannot save failing cases to /dev/null/folder: /dev/null is not a folder"),
    ],
)
def test_wrong_use_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    def not_reached(*arguments: object, **options: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(Bench, "__init__", not_reached)
    with pytest.raises(WrongUse, match=re.escape(message)):
        run("right.py:Right", **options)


def test_no_candidate_and_no_such_candidate_are_wrong_use() -> None:
    with pytest.raises(WrongUse, match="no candidate is given: name at least one, for example builtin"):
        verify()
    with pytest.raises(UnknownCandidate, match="has no 'Nope'"):
        run("right.py:Right", "right.py:Nope")


def test_the_message_about_a_large_world_says_why() -> None:
    with pytest.raises(WorldTooLarge, match=r"at most \d+ \(.+\); ask for fewer or use a larger machine$"):
        run("right.py:Right", max_world=10**6)
