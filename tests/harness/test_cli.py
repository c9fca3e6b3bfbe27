"""The command line: what is printed, which exit code, and what is left behind; from a shell where that matters."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hearing import hear_interrupts
from hypothesis.configuration import storage_directory
from test_world_ends import Parent
from trials import CANDIDATES, candidate, line

from harness.case_file import read
from harness.cli import main
from harness.properties import PROPERTIES
from harness.report.terminal import causes_first
from harness.verdict import Finding

SMALL = ("--subject", "linear", "--examples", "5", "--max-world", "2", "--seed", "1")
ENVIRONMENT = {**os.environ, "COLUMNS": "300"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to start in; the command takes over SIGTERM, which is pytest's here."""
    monkeypatch.setattr("harness.world.terminate_cleanly", lambda: None)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def verify(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["verify", *arguments])


def started(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "harness.cli", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env={**ENVIRONMENT, **environment}, preexec_fn=hear_interrupts
    )


def test_all_holds(folder: Path) -> None:
    result = verify(candidate("right.py:Right"), *SMALL)
    assert result.exit_code == 0, result.output
    first, started, *others = result.output.splitlines()
    assert (first, started) == ("seed 1", "right.py:Right linear: 5 examples to run")
    assert re.fullmatch(r"right.py:Right linear: held, 5 examples in \d+\.\d s", others[0])
    assert re.search(r"right.py:Right +Right +linear +held +5 ", others[-1])
    assert list(folder.iterdir()) == [], "nothing is saved where nothing fails"


def test_hypothesis_leaves_nothing(folder: Path) -> None:
    before = storage_directory().path
    # Shrinking reads the constants of modules, which Hypothesis then keeps.
    assert verify(candidate("returning.py:NaN"), *SMALL, "--examples", "20", "--save", "kept").exit_code == 1
    assert [path.name for path in folder.iterdir()] == ["kept"]
    assert storage_directory().path == before, "somebody's own test run has its own"


def test_a_failure_is_told_with_all_that_is_needed(folder: Path) -> None:
    result = verify(candidate("returning.py:NaN"), *SMALL, "--save", "kept", "--json", "run.json")
    assert result.exit_code == 1
    seed, _, failed, row, *lines = result.output.splitlines()
    assert seed == "seed 1"
    assert re.fullmatch(r"returning.py:NaN linear: case \d failed", failed)
    assert row.startswith("returning.py:NaN linear: fault: mismatch, ")
    assert lines[0] == f"mismatch: {candidate('returning.py:NaN')}, linear"
    assert lines[1] == "  output[0] differs from one process on rank 0: 1 of 1 elements"
    assert re.fullmatch(
        r"    rank 0: first wrong element \[0, 0, 0\] of output\[0\] \(local \[0, 0\]\): got nan, want -?\d+\.0",
        lines[2],
    )
    (case,) = (text.removeprefix("  case: ") for text in lines if text.startswith("  case: "))
    (replay,) = (text for text in lines if text.startswith("  replay: "))
    (saved,) = (text.removeprefix("  saved: ") for text in lines if text.startswith("  saved: "))
    assert replay == f"  replay: shardproof replay '{case}'"
    assert Path(saved).parent == Path("kept")
    assert read(saved) == read(case)
    data = json.loads((folder / "run.json").read_text())
    assert data["exit_code"] == 1
    assert json.dumps(data["rows"][0]["failures"][0]["reproducer"]) == case
    assert "fault: mismatch" in lines[-1]
    assert "found after" in lines[-1]


def test_a_side_effect_is_told_before_what_it_explains() -> None:
    result = CliRunner().invoke(main, ["replay", line("changing.py:InputOnRank1")])
    assert result.exit_code == 1
    first, effect, wrong, *_ = result.output.splitlines()
    assert first == f"mismatch: {candidate('changing.py:InputOnRank1')}, linear", "the kind is that of the gravest"
    assert effect == "  the candidate changed input[0] in place"
    assert wrong == "  weight.grad differs from one process on rank 1: 4 of 8 elements"


def test_many_findings_hide_no_side_effect() -> None:
    wrong = [Finding("mismatch", f"wrong {n}") for n in range(6)]
    effects = [Finding("side-effect", f"effect {n}") for n in range(2)]
    assert [f.message for f in causes_first([*wrong, *effects])][:4] == ["effect 0", "effect 1", "wrong 0", "wrong 1"]
    assert causes_first(wrong) == wrong


def test_failures_are_saved_in_a_folder_of_ours_by_default(folder: Path) -> None:
    verify(candidate("returning.py:NaN"), *SMALL)
    (saved,) = (folder / ".shardproof" / "failures").iterdir()
    assert saved.name.startswith("linear-returning-py-NaN-")


def test_an_unusable_candidate_is_told_once_for_all_subjects() -> None:
    result = verify(candidate("raising_on_import.py:Mine"), "--examples", "5")
    assert result.exit_code == 1
    assert result.output.count("ModuleNotFoundError: No module named 'no_such_library'") == 1
    assert result.output.count("fault: error") == 2 * len(PROPERTIES), "as progress, and in the table"
    assert "replay" not in result.output


def test_nothing_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.engine._MOST_REFUSED", 2)
    result = verify(candidate("refusing.py:Everything"), *SMALL)
    assert result.exit_code == 3
    assert "nothing ran" in result.output
    assert "the candidate refused 2 cases, for example: only on Tuesdays" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bulletin"], "unknown candidate 'bulletin': expected one of builtin, "),
        (["missing.py:Mine"], "candidate 'missing.py:Mine': there is no file "),
        ([f"{CANDIDATES}/right.py:Nope"], "right.py has no 'Nope'; candidates in it: Right"),
        ([f"{CANDIDATES}/declaring.py:NoCandidate"], "expected a subclass of harness.Candidate"),
        ([f"{CANDIDATES}/right.py:Right+v2"], "Right has no variants, but was asked for +v2: leave it out"),
        ([f"{CANDIDATES}/declaring.py:UnknownFeature"], "declares what cannot be used: supports names 'teleportation'"),
        (["builtin+F99"], "F99"),
        ([], "Missing argument 'CANDIDATE...'"),
        (["builtin", "--subject", "lineal"], "unknown subject 'lineal': expected one of mesh, collectives"),
        (["builtin", "--dtype", "fp8"], "unknown dtype 'fp8': expected one of fp32, fp64, bf16, fp16"),
        (["builtin", "--examples", "0"], "examples is 0: expected at least 1"),
        (["builtin", "--examples", "many"], "'many' is not a valid integer"),
        (["builtin", "--seed", "-1"], "-1 is not in the range x>=0"),
        (["builtin", "--max-world", "0"], "max_world is 0: expected at least 1"),
        (["builtin", "--max-world", "1000000"], "a world of 1000000 ranks is more than this machine allows: at most "),
        (["builtin", "--time-budget", "0"], "time_budget is 0.0: expected seconds above 0"),
        (["builtin", "--deadline", "nan"], "deadline is nan: expected seconds above 0"),
        (["builtin", "--json", "no/such/run.json"], "--json no/such/run.json: there is no folder "),
        (["builtin", "--save", "/dev/null/x"], "cannot save failing cases to /dev/null/x: /dev/null is not a folder"),
    ],
)
def test_wrong_use_has_exit_code_2_and_names_the_value(arguments: list[str], message: str) -> None:
    result = verify(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["tp=2,dp=3"], 0, "tp=2,dp=3: 6 ranks, first axis fastest"),
        (["tp=2,dp=3", "--world", "6"], 0, "6 ranks"),
        (["tp=2,dp=3", "--world", "8"], 2, "the mesh sizes (tp=2 x dp=3) multiply to 6, but the world has 8 ranks"),
        (["tp=two"], 2, "cannot read 'tp=two' as an axis: write AXIS=SIZE, for example tp=2,dp=3"),
        ([f"tp={10**12}"], 2, "a mesh of 1000000000000 ranks does not fit into the memory that is available: at most "),
        (["tp=100,dp=100"], 0, "and 9936 more ranks"),
        (["fsdp=2"], 2, "unknown mesh axis 'fsdp': expected one of tp, cp, ep, dp, pp"),
        (["tp=2", "--order", "dp"], 2, "order 'dp' leaves out axis 'tp' of size 2: name it"),
    ],
)
def test_meshes(arguments: list[str], code: int, message: str) -> None:
    result = CliRunner().invoke(main, ["mesh", *arguments])
    assert result.exit_code == code
    assert message in result.output


def test_an_exception_of_our_own_is_no_fault_of_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> Any:
        raise ZeroDivisionError("in our arithmetic")

    monkeypatch.setattr(importlib.import_module("harness.verification"), "verify", broken)
    result = verify("builtin", *SMALL)
    assert result.exit_code == 2
    assert "Error: this is a fault of shardproof's own.\nTraceback" in result.output
    assert result.output.endswith("ZeroDivisionError: in our arithmetic\n")


def test_a_file_that_cannot_be_written_at_the_end_does_not_hide_the_result() -> None:
    result = verify(candidate("right.py:Right"), *SMALL, "--json", "/dev/full")
    assert result.exit_code == 2
    assert "held" in result.output
    assert "Error: cannot write --json /dev/full: " in result.output
    assert "Traceback" not in result.output


def test_a_fault_stays_one_where_nothing_can_be_written() -> None:
    too_long = "x" * 300
    result = verify(candidate("returning.py:NaN"), *SMALL, "--json", "/dev/full", "--save", too_long)
    assert result.exit_code == 1
    assert f"  not saved: [Errno 36] File name too long: '{too_long}'\n" in result.output
    assert "fault: mismatch" in result.output
    assert "Error: cannot write --json /dev/full: " in result.output
    assert "Traceback" not in result.output


def test_a_file_that_cannot_be_written_is_refused_before_an_hour_has_passed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    result = verify("builtin", "--json", "run.json")
    assert result.exit_code == 2
    assert "Error: --json run.json: it cannot be written to" in result.output


def test_what_a_candidate_prints_does_not_reach_our_output(folder: Path) -> None:
    process = started("verify", candidate("printing.py:Loud"), *SMALL)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "noise" not in output
    assert output.startswith("seed 1\n")
    for noise in ("noise of an import", "noise without an end", "noise of C code"):
        assert noise in errors


def test_the_same_seed_draws_the_same_cases_in_another_process(folder: Path) -> None:
    seeds = {"one": "1", "two": "1", "three": "2"}
    runs = {
        name: started(
            "verify", candidate("recording.py:Recording"), *SMALL[:-1], seed, RECORDED_CASES=str(folder / name)
        )
        for name, seed in seeds.items()
    }
    drawn = {}
    for name, process in runs.items():
        output, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
        assert output.startswith(f"seed {seeds[name]}\n")
        drawn[name] = (folder / name).read_text().splitlines()
    assert drawn["one"] == drawn["two"] != drawn["three"]
    assert len(drawn["one"]) == 5


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_the_printed_line_reproduces_the_failure_in_a_new_process(folder: Path) -> None:
    awkward = folder / "it's a folder"
    awkward.mkdir()
    for file in ("right.py", "returning.py"):
        shutil.copy(CANDIDATES / file, awkward)
    result = verify("it's a folder/returning.py:WrongGradientOnLastRank", *SMALL)
    (command,) = (x.removeprefix("  replay: ") for x in result.output.splitlines() if x.startswith("  replay: "))
    command = command.replace("shardproof", f"{sys.executable} -m harness.cli", 1)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 1, done.stderr
    *_, told = result.output.partition("\nmismatch: ")
    assert done.stdout.splitlines()[:3] == f"mismatch: {told}".splitlines()[:3], "the same finding, word for word"


@pytest.fixture
def parents(tmp_path: Path) -> Iterator[list[Parent]]:
    started: list[Parent] = []
    yield started
    for parent in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent.process.pid, signal.SIGKILL)
        parent.process.wait()


ENDLESS = """
import sys
from harness.cli import main
sys.argv = ["shardproof", "verify", "builtin", "--examples", "1000000", "--max-world", "2"]
main()
"""


SHRINKING = """
import sys
from harness.cli import main
command = "verify builtin+F04 builtin --subject linear --subject mesh --examples 200 --seed 1 --json run.json"
sys.argv = ["shardproof", *command.split()]
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_run_that_is_ended_says_what_it_has_found(folder: Path, parents: list[Parent]) -> None:
    parent = Parent(folder, SHRINKING)
    parents.append(parent)
    while "failed" not in (line := parent.line()):
        assert line, parent.errors()
    os.killpg(os.getpgid(parent.process.pid), signal.SIGINT)
    assert parent.process.stdout is not None
    said = " ".join(parent.process.stdout.read().split())
    assert parent.process.wait(20) == 130, parent.errors()
    assert "mismatch: builtin+F04, linear" in said
    assert "replay: shardproof replay" in said
    assert "interrupted before it began" in said
    data = json.loads((folder / "run.json").read_text())
    assert data["interrupted"] is True
    assert [(row["candidate"], row["subject"], row["result"]) for row in data["rows"]] == [
        ("builtin+F04", "linear", "fault"),
        ("builtin+F04", "mesh", "nothing ran"),
        ("builtin", "linear", "nothing ran"),
        ("builtin", "mesh", "nothing ran"),
    ]
    assert Path(data["rows"][0]["failures"][0]["saved"]).is_file()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize(("ending", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("seconds", [0.0, 2.0])
def test_a_run_that_is_ended_leaves_nothing(
    folder: Path, parents: list[Parent], ending: signal.Signals, code: int, seconds: float
) -> None:
    parent = Parent(folder, ENDLESS)
    parents.append(parent)
    assert parent.line()[0] == "seed", parent.errors()
    time.sleep(seconds)
    os.killpg(os.getpgid(parent.process.pid), ending)  # as the terminal does
    assert parent.process.wait(20) == code, parent.errors()
    parent.assert_nothing_is_left()
    assert "Traceback" not in parent.errors()
    assert [path.name for path in folder.iterdir() if path.name not in ("tmp", "script.py", "stderr")] == []
