"""benchmarks/timeline.py: its arithmetic of intervals, and that a run tells and draws them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "timeline.py"


@pytest.fixture(scope="module")
def timeline() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_timeline", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("expected", "ranks", "hidden", "beside"),
    [
        ([(0, 4)], [[(1, 9)], [(2, 10)]], 4, 3),  # the ranks are told at 0 and begin at 1
        ([(0, 4)], [[(0, 3)], [(0, 2)]], 3, 3),  # the parent is late by 1
        ([(0, 4)], [[(1, 2)], [(3, 8)]], 4, 2),
        ([(0, 4)], [[(1, 2), (6, 8)], [(1, 3), (6, 8)]], 3, 2),  # the second run begins after the first is judged
    ],
)
def test_what_is_hidden_is_what_nobody_waits_for(
    timeline: Any, expected: Any, ranks: Any, hidden: float, beside: float
) -> None:
    made = timeline.Timeline("a case", expected, [(20, 21)], ranks)
    assert (made.computing, made.hidden, made.beside, made.span) == (4, hidden, beside, (0, 21))


def test_times_that_overlap_count_once(timeline: Any) -> None:
    assert timeline.merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert timeline.length(timeline.merged([(0, 2), (1, 3)])) == 3


def test_bars_are_drawn_to_scale(timeline: Any) -> None:
    made = timeline.Timeline("a case", [(0, 2)], [(9, 10)], [[(1, 8)], [(0, 9)]])
    assert timeline.lines(made, width=10) == [
        ("parent", "ee       j"),
        ("rank 0", " =======  "),
        ("rank 1", "========= "),
    ]


def test_a_run_tells_and_draws_them(tmp_path: Path) -> None:
    picture = tmp_path / "timeline.png"
    command = [sys.executable, str(SCRIPT), "--cases", "3", "--world", "2", "--show", "2", "--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^  parent  \|.*e.*j.*\|$", done.stdout, re.M)) == 2
    assert len(re.findall(r"^  rank \d  \|.*=.*\|$", done.stdout, re.M)) == 4
    (share,) = re.findall(r"^hidden behind the ranks: ([\d.]+)% of the parent's computing", done.stdout, re.M)
    assert 0 < float(share) <= 100
    assert picture.read_bytes().startswith(b"\x89PNG")
