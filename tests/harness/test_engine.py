"""The search: reproducible, every kind of fault shrunk, flaky ones kept, our own told apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from trials import BAD, GOOD, TWO, bench, judge

from harness.bench import Bench, Trial, _flaky
from harness.engine import Limits, search
from harness.events import Row
from harness.fault import Fault, fault_class, with_cause
from harness.find import Spec
from harness.oracle.diagnose import POSSIBLE
from harness.properties import PROPERTIES
from harness.properties.base import Description
from harness.report.terminal import _note
from harness.verdict import Finding, Verdict
from reference.linear import LinearCase
from reference.mesh import Mesh

LINEAR = PROPERTIES["linear"]


def searched(
    made: Bench, subject: Any = LINEAR, *, tell: Callable[[bool], None] = lambda _: None, **limits: Any
) -> Row:
    scope = made.description.scope(2, ["fp32"])
    return search(made, subject, scope, Limits(**{"examples": 10, "seed": 3, "shrink_seconds": 10.0, **limits}), tell)


def drawn(seed: int) -> list[LinearCase]:
    """The cases of a run in which each holds, in order."""
    cases: list[LinearCase] = []

    def expected(case: LinearCase) -> Any:
        cases.append(case)
        return LINEAR.expected(case)

    with bench("right.py:Right") as made:
        row = searched(made, dataclasses.replace(LINEAR, expected=expected), seed=seed)
    assert row.result == "held"
    assert row.examples == len(cases) == 10
    return cases


@pytest.mark.parametrize("left_open", [0, 3])
def test_cases_that_leave_values_open_are_counted(left_open: int) -> None:
    facts = {"worst": 1.0, "slope": 1.0, "ambiguous": left_open}
    open_ = replace(LINEAR, judge=lambda *args: Verdict(facts=facts))
    with bench("right.py:Right") as made:
        row = searched(made, open_)
    assert row.left_open == (10 if left_open else 0)
    said = "in 10 some values near overflow were left open"
    assert (said in _note(row)) == bool(left_open)


def test_the_seed_decides_the_cases_and_their_order() -> None:
    first = drawn(5)
    assert drawn(5) == first
    assert drawn(6) != first


def test_a_fault_is_shrunk_to_the_simplest_case() -> None:
    told: list[bool] = []
    with bench("raising.py:InForward") as made:
        row = searched(made, tell=told.append)
    (failure,) = row.failures
    case = failure.reproducer.case
    assert (row.result, failure.kind) == ("fault", "error")
    assert case == LinearCase(dataclasses.replace(TWO, axes=(("tp", 1),)), "column", 1, 1, bias=True)
    assert row.found_after == told.index(True) + 1
    assert failure.history == (), "it was seen in fresh processes"


def test_the_cause_that_the_first_case_told_is_kept() -> None:
    """A shrunk case may have too few values to tell."""
    known = Finding("mismatch", "x differs", tensor="x[1].grad", cause="every element is 2 times too large")
    elsewhere = replace(known, tensor="x[0]")
    unsure = Finding("mismatch", "x differs", tensor="x[0].grad", details=f"{POSSIBLE}: it is doubled\nlayout: Whole()")
    place = replace(known, cause="x[1].grad is wrong on rank 1 (tp=1) only")
    other, sure = Finding("hang", "no rank finished"), replace(unsure, cause="it is zero everywhere")

    def fault(finding: Finding) -> Fault:
        return fault_class(finding.kind)(GOOD, Trial(Verdict((finding, unsure))))

    told = with_cause(fault(unsure), fault(known)).trial.verdict.findings
    assert told[0].cause == f"{known.cause} (seen in the case that failed first, before it was shrunk)"
    assert told[0].details == "layout: Whole()"
    assert told[1] == unsure
    pairs = ((sure, known), (unsure, unsure), (other, known), (unsure, other), (unsure, elsewhere), (unsure, place))
    for shrunk, first in pairs:
        assert with_cause(fault(shrunk), fault(first)).trial.verdict.findings[0] == shrunk


def test_a_failure_that_depends_on_what_ran_before_is_flaky_and_names_it() -> None:
    other = dataclasses.replace(BAD, in_features=3)
    with bench("flaky.py:SecondCase") as made:
        assert judge(made, BAD).holds
        assert judge(made, GOOD).holds
        trial = made.check(LINEAR, other)
        assert judge(made, GOOD).holds
    (finding,) = trial.verdict.findings[:1]
    assert finding.kind == "flaky"
    why = "probably state left behind by an earlier case"
    assert finding.message.startswith(f"failed once and held in fresh processes, {why}: output[0] differs from one")
    assert (finding.tensor, finding.place) == ("output[0]", "rank 0 (tp=0)")
    assert len(trial.history) == 2, "the cases, and no job of our own"
    assert finding.details.splitlines()[-3:] == [
        "2 cases ran before it in these processes:",
        *(f"  {line}" for line in trial.history),
    ]
    assert trial.history[0] == '{"mesh": "tp=2", "kind": "column", "in_features": 2, "out_features": 4, "bias": true}'


def test_of_many_earlier_cases_the_last_few_are_shown() -> None:
    found = Finding("mismatch", "wrong", details="where")
    cases = tuple(f"case {number}" for number in range(20))
    (finding,) = _flaky(Trial(Verdict((found,)), cases))
    assert finding.details.splitlines() == [
        "where",
        "20 cases ran before it in these processes, the last 3:",
        "  case 17",
        "  case 18",
        "  case 19",
    ]
    (finding,) = _flaky(Trial(Verdict((found,)), cases[:1]))
    assert finding.details == "where\n1 case ran before it in these processes:\n  case 0"
    (finding,) = _flaky(Trial(Verdict((found,))))
    assert (finding.kind, finding.details) == ("flaky", "where")
    why = "nothing ran before it, so probably a loaded machine"
    assert finding.message == f"failed once and held in fresh processes, {why}: wrong"


def test_flaky_failures_are_never_dropped() -> None:
    with bench("flaky.py:SecondCase") as made:
        row = searched(made, examples=15)
    assert row.result == "fault"
    assert {failure.kind for failure in row.failures} == {"flaky"}
    assert row.examples == 15, "the search goes on: there may be a fault that stays"
    assert all(failure.history for failure in row.failures)


@pytest.mark.parametrize("part", ["expected", "judge"])
def test_our_own_fault_is_told_apart(part: str) -> None:
    def broken(*arguments: object) -> Any:
        raise ZeroDivisionError("in our arithmetic")

    subject: Any = dataclasses.replace(LINEAR, **{part: broken})
    with bench("right.py:Right") as made:
        row = searched(made, subject)
        assert made.check(LINEAR, GOOD).verdict.holds, "and the next case runs"
    (failure,) = row.failures
    assert failure.kind == "harness"
    finding = failure.verdict.findings[0]
    said = "the reference raised" if part == "expected" else "judging raised"
    assert finding.message == f"{said} ZeroDivisionError: in our arithmetic"
    assert "in broken" in finding.details


def test_a_candidate_that_refuses_everything_ran_nothing_and_is_not_asked_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("harness.engine._MOST_REFUSED", 5)
    with bench("refusing.py:Everything") as made:
        row = searched(made, examples=1000)
    assert (row.result, row.examples, row.rejected) == ("nothing ran", 0, 5)
    assert row.stopped == "the candidate refused 5 cases, for example: only on Tuesdays"


def test_refused_cases_are_counted_and_not_as_passed() -> None:
    with bench("refusing.py:Bias") as made:
        row = searched(made)
    assert row.result == "held"
    assert row.examples > 0
    assert row.rejected > 0


def test_a_used_up_time_budget_is_said() -> None:
    with bench("right.py:Right") as made:
        row = searched(made, examples=100_000, time_budget=0.5)
    assert row.result == "held"
    assert 0 < row.examples < 100_000
    assert row.stopped == "the time budget is used up: this row had 0.5 s of it"


def test_no_time_at_all_is_said() -> None:
    with bench("right.py:Right") as made:
        row = searched(made, time_budget=0.0)
    assert (row.result, row.examples) == ("nothing ran", 0)
    assert row.stopped == "no time was left of the time budget"


class Hanging:
    """A bench by whose clock every case hangs until the deadline, after some that hold for a while."""

    spec = Spec("hanging", "hanging:Hanging", None)

    def __init__(self, clock: list[float], deadline: float, holds: float) -> None:
        self.clock, self.deadline, self.holds = clock, deadline, holds

    def once(self, subject: Any, case: Any, delays: int = 0) -> Trial:
        if self.clock[0] < self.holds:
            self.clock[0] += 0.2
            return Trial(Verdict())
        self.clock[0] += self.deadline
        return Trial(Verdict((Finding("hang", "no rank finished"),)))

    afresh = once

    def check(self, subject: Any, case: Any, delays: int = 0) -> Trial:
        first = self.once(subject, case)
        return self.once(subject, case) if first.verdict.findings else first


@pytest.mark.parametrize("first_hang", [0.0, 5.0, 11.9])
def test_hangs_overrun_a_time_budget_by_a_few_deadlines(monkeypatch: pytest.MonkeyPatch, first_hang: float) -> None:
    clock, budget, deadline = [0.0], 12.0, 3.0
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    made: Any = Hanging(clock, deadline, first_hang)
    scope = Description("hanging", "Hanging", methods=frozenset(LINEAR.methods), dtypes=("fp32",), axes=("tp",))
    row = search(made, LINEAR, scope.scope(2, None), Limits(examples=10_000, seed=3, time_budget=budget))
    assert [failure.kind for failure in row.failures] == ["hang"]
    # Confirmed, shrunk for 3 s at least with a case that is still running then, and confirmed again.
    assert clock[0] <= max(budget, first_hang + 2 * deadline + 3.0) + 2 * deadline + 1.0


def test_without_a_time_budget_shrinking_has_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    made: Any = Hanging(clock, 3.0, 0.0)
    scope = Description("hanging", "Hanging", methods=frozenset(LINEAR.methods), dtypes=("fp32",), axes=("tp",))
    row = search(made, LINEAR, scope.scope(2, None), Limits(seed=3))
    assert row.failures[0].reproducer.case == LinearCase(Mesh.of(tp=1), "column", 1, 1)
    assert clock[0] <= 6.0 + 30.0 + 3.0 + 30.0 + 3.0 + 3.0
