"""Runs the misbehaving candidates of `candidates_for_tests`: a case in which they misbehave, then one in which not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.bench import Bench
from harness.case_file import Reproducer
from harness.properties import PROPERTIES
from harness.verdict import Finding, Verdict
from reference.linear import LinearCase
from reference.mesh import Mesh, MeshCase

CANDIDATES = Path(__file__).parent / "candidates_for_tests"
TWO = Mesh.of(tp=2)
#: The candidates misbehave in the one with the bias.
BAD = LinearCase(TWO, "column", 2, 4, bias=True)
GOOD = LinearCase(TWO, "column", 2, 4)
LIVE, ON_PAPER = MeshCase(TWO, live=True), MeshCase(TWO)


def candidate(name: str) -> str:
    """The spec of a misbehaving candidate, ``file.py:Class``."""
    return f"{CANDIDATES}/{name}"


def line(name: str, case: Any = BAD) -> str:
    """The reproducer of a case."""
    return Reproducer(candidate(name), "linear" if isinstance(case, LinearCase) else "mesh", case).line()


@contextmanager
def bench(name: str, deadline: float = 20.0) -> Iterator[Bench]:
    """Its ranks, which are soon given up when all of them sleep."""
    with Bench(candidate(name), deadline=deadline, quiet=1.0) as made:
        yield made


def judge(made: Bench, case: Any) -> Verdict:
    subject = "linear" if isinstance(case, LinearCase) else "mesh"
    return made.check(PROPERTIES[subject], case).verdict


def only_finding(name: str, case: Any = BAD, after: Any = GOOD) -> Finding:
    """The gravest finding of a case; the case after it must hold."""
    with bench(name) as made:
        found, following = judge(made, case), judge(made, after)
    assert following.holds, f"the next case must run and hold: {following}"
    assert found.findings, found
    return found.findings[0]
