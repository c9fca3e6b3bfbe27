"""`harness.cases` and `harness.check` in somebody's own pytest run."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from trials import BAD, GOOD, candidate

import harness
from harness import cases, check
from harness.bench import CandidateUnusable
from harness.case_file import read
from harness.errors import WrongUse

THEIRS = f"""
from hypothesis import Phase, given, settings
from harness import cases, check

WRONG, RIGHT = {candidate("returning.py:WrongGradientOnLastRank")!r}, {candidate("right.py:Right")!r}

@settings(database=None, deadline=None, max_examples=5, derandomize=True)
@given(case=cases("linear", RIGHT, max_world=2, dtypes=("fp32",)))
def test_right(case):
    assert case.mesh.size <= 2 and case.dtype == "fp32"
    check("linear", RIGHT, case)

@settings(database=None, deadline=None, max_examples=50, derandomize=True, phases=[Phase.generate])
@given(case=cases("linear", WRONG, max_world=2))
def test_wrong(case):
    check("linear", WRONG, case)
"""


def test_a_failing_case_tells_the_whole_story_in_a_pytest_run(tmp_path: Path) -> None:
    file = tmp_path / "test_theirs.py"
    file.write_text(THEIRS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "80"},
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    told = [line.removeprefix("E").strip() for line in done.stdout.splitlines() if line.startswith("E  ")]
    assert f"mismatch: {candidate('returning.py:WrongGradientOnLastRank')}, linear" in told
    assert any(".grad differs from one process on rank " in line for line in told)
    assert any(re.match(r"rank \d.*: first wrong element \[\d.*\): got .*, want ", line) for line in told)
    (case,) = {line.removeprefix("case: ") for line in told if line.startswith("case: ")}
    assert f"replay: shardproof replay '{case}'" in told, "on one line, however narrow the terminal"
    assert read(case).case.bias


@pytest.mark.parametrize("name", harness.__all__)
def test_a_public_name_is_what_it_says_and_no_module(name: str) -> None:
    # A module imported later takes the place of a name that the package makes on demand.
    for path in sorted(Path(harness.__file__).parent.glob("*.py")):
        importlib.import_module(f"harness.{path.stem}".removesuffix(".__init__"))
    assert not isinstance(getattr(harness, name), ModuleType)


def test_a_case_that_holds_and_one_that_does_not() -> None:
    name = candidate("returning.py:TooMany")
    check("linear", name, GOOD)
    with pytest.raises(AssertionError, match=r"\n  wrong result on every rank: forward returned 2 values") as caught:
        check("linear", name, BAD)
    (line,) = (x for x in str(caught.value).splitlines() if x.startswith("  case: "))
    assert json.loads(line.removeprefix("  case: "))["candidate"] == name


def test_a_candidate_without_the_subject_is_refused() -> None:
    with pytest.raises(ValueError, match=r"right\.py:Right does not offer the subject 'mesh': leave it out"):
        cases("mesh", candidate("right.py:Right"))
    with pytest.raises(ValueError, match="unknown subject 'lineal': expected one of mesh, collectives"):
        cases("lineal", candidate("right.py:Right"))


def test_limits_and_cases_that_cannot_be_used_are_refused() -> None:
    right = candidate("right.py:Right")
    with pytest.raises(WrongUse, match="unknown dtype 'fp8': expected one of fp32"):
        cases("linear", right, dtypes=("fp8",))
    with pytest.raises(WrongUse, match="max_world is 0: expected at least 1"):
        cases("linear", right, max_world=0)
    with pytest.raises(ValueError, match="has none of the dtypes fp32: expected some of bf16"):
        cases("linear", candidate("inexact.py:OnlyBf16"), dtypes=("fp32",))
    with pytest.raises(WrongUse, match=r"the case is \{'mesh': 'tp=1'\}: expected a LinearCase, as cases"):
        check("linear", right, {"mesh": "tp=1"})


def test_an_unusable_candidate_tells_why_with_its_traceback() -> None:
    with pytest.raises(CandidateUnusable, match="No module named 'no_such_library'\nTraceback") as caught:
        cases("linear", candidate("raising_on_import.py:Mine"))
    assert 'raising_on_import.py", line 3' in str(caught.value)


def test_a_candidate_beside_the_test_that_draws_its_cases_is_refused(tmp_path: Path) -> None:
    """Ranks import the candidate's module, and with it the test, which would start ranks that import it again."""
    file = tmp_path / "test_one.py"
    file.write_text(
        "from hypothesis import given\n"
        "from harness import cases, check\n"
        "from harness.candidates.builtin import Builtin\n"
        "class Mine(Builtin):\n"
        "    pass\n"
        "@given(case=cases('linear', Mine))\n"
        "def test_mine(case):\n"
        "    check('linear', Mine, case)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert ran.returncode != 0
    assert "a test that draws cases belongs into another one" in ran.stdout
