"""The last of the examples lie near the worst cases; those before them do not depend on any statistic."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.internal.conjecture.choice import ChoiceNode

from harness.bench import Trial
from harness.engine import Limits, search
from harness.events import Row
from harness.find import Spec
from harness.properties import PROPERTIES
from harness.properties.base import Description
from harness.steering import Plan, Steering, aim
from harness.verdict import Finding, Verdict
from reference.linear import LinearCase, LinearRecipes
from reference.mesh import Mesh
from reference.recipe import Recipe

#: Six choices that count, two of them in a list that may be shorter, among some that do not.
CASES = st.builds(
    LinearCase,
    mesh=st.just(Mesh.of(tp=1)),
    kind=st.sampled_from(["column", "row"]),
    in_features=st.integers(1, 12),
    out_features=st.integers(1, 12),
    leading=st.lists(st.tuples(st.integers(1, 12)), min_size=1, max_size=2).map(tuple),
    bias=st.booleans(),
    transposed=st.booleans(),
    recipes=st.builds(LinearRecipes, *[st.builds(Recipe, seed=st.integers(0, 99))] * 4),
)
LINEAR = replace(PROPERTIES["linear"], cases=lambda scope: CASES)
DESCRIPTION = Description("scored", "Scored", methods=frozenset(LINEAR.methods), dtypes=("fp32", "bf16"), axes=("tp",))

#: Of 100 cases hardly one is so large.
FAILS = 0.45

Score = Callable[[LinearCase], float | None]


def size(case: LinearCase) -> float:
    """What can be climbed one choice at a time: 1 for the largest case there is, and far less for most."""
    seeds = case.recipes.input.seed * case.recipes.weight.seed / 99**2
    return seeds * case.in_features * case.out_features * sum(map(math.prod, case.leading)) / (12 * 12 * 24)


class Scored:
    """A bench on which a case has the statistic ``score`` says, and fails where that is ``fails`` or more."""

    spec = Spec("scored", "scored:Scored", None)

    def __init__(self, score: Score, fails: float = math.inf, clock: list[float] | None = None) -> None:
        self.score, self.fails, self.clock = score, fails, clock
        self.cases: list[LinearCase] = []

    def once(self, subject: Any, case: LinearCase, delays: int = 0) -> Trial:
        self.cases.append(case)
        if self.clock is not None:
            self.clock[0] += 0.1
        score = self.score(case)
        if score is None:
            return Trial(Verdict())
        wrong = (Finding("mismatch", "leans"),) if self.fails <= score < math.inf else ()
        return Trial(Verdict(wrong, facts={"worst": 0.0, "slope": score}))

    check = afresh = once


def searched(bench: Any, seed: int = 1, **limits: Any) -> Row:
    scope = DESCRIPTION.scope(4, None)
    return search(bench, LINEAR, scope, Limits(**{"seed": seed, "shrink_seconds": 0.5, **limits}))


def ran(score: Score, **limits: Any) -> list[LinearCase]:
    bench = Scored(score)
    assert searched(bench, **limits).result == "held"
    return bench.cases


def test_a_fault_that_grows_with_what_can_be_climbed_is_found_in_more_runs() -> None:
    seeds = range(20)
    alone = [max(map(size, ran(size, seed=seed, steered=0.0))) for seed in seeds]
    steered = [max(map(size, ran(size, seed=seed))) for seed in seeds]
    found = [sum(highest >= FAILS for highest in each) for each in (alone, steered)]
    assert found[0] <= 5, alone
    assert found[1] >= 11, steered


def test_the_cases_before_do_not_depend_on_any_number() -> None:
    up, down = ran(size), ran(lambda case: 1 - size(case))
    assert len(up) == len(down) == 100, "as many cases as examples"
    assert up[:80] == down[:80] == ran(size, steered=0.0)[:80]
    assert up[80:] != down[80:]
    assert ran(size) == up


@pytest.mark.parametrize("statistic", [None, 0.0, math.inf, math.nan])
def test_without_a_statistic_to_raise_all_cases_are_drawn_independently(statistic: float | None) -> None:
    assert ran(lambda case: statistic) == ran(size, steered=0.0)


def test_what_steering_finds_is_shrunk_and_counted() -> None:
    (seed, row) = next(
        (seed, row)
        for seed in range(50)
        if (row := searched(Scored(size, fails=FAILS), seed, shrink_seconds=5.0)).found_after is not None
        and row.found_after > 80
    )
    (failure,) = row.failures
    case = failure.reproducer.case
    assert size(case) >= FAILS
    assert (case.bias, case.transposed, case.recipes.bias) == (False, False, Recipe()), "what does not matter is plain"
    first = Scored(size)
    searched(first, seed, examples=100)
    assert row.found_after is not None
    assert size(first.cases[row.found_after - 1]) >= FAILS


def test_of_a_time_budget_steering_has_the_last_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    cases = []
    for steered in (0.2, 0.0):
        bench, clock[0] = Scored(size, clock=clock), 0.0
        row = searched(bench, examples=10_000, time_budget=20.0, steered=steered)
        assert row.stopped == "the time budget is used up: this row had 20.0 s of it"
        cases.append(bench.cases)
    assert 190 <= len(cases[0]) <= 210
    same = next(n for n, (one, other) in enumerate(zip(*cases, strict=False)) if one != other)
    assert 155 <= same <= 170


def test_statistics_that_are_no_number_are_not_told() -> None:
    told: dict[str, float] = {}

    @hypothesis.settings(database=None, max_examples=1)
    @hypothesis.given(st.just(None))
    def run(_: None) -> None:
        aim(Verdict(facts={"worst": math.inf, "slope": 2.0, "ambiguous": 3}))
        told.update(hypothesis.control.current_build_context().data.target_observations)

    run()
    assert told == {"slope": 2.0}
    aim(Verdict(facts={"worst": 1.0}))  # outside of a test there is nobody to tell


def integer(value: int, most: int, *, forced: bool = False) -> ChoiceNode:
    constraints: Any = {"min_value": 0, "max_value": most, "weights": None, "shrink_towards": 0}
    return ChoiceNode(type="integer", value=value, constraints=constraints, was_forced=forced)


def drawn(plan: Plan, most: int, *fresh: int) -> int:
    left = iter(fresh)
    return plan.draw("integer", integer(0, most).constraints, lambda: next(left))


def test_a_plan_keeps_draws_afresh_and_skips() -> None:
    plan = Plan([integer(3, 9), integer(1, 4), integer(7, 8), integer(5, 9)], {2})
    assert drawn(plan, 9) == 3
    assert drawn(plan, 6, 2) == 2, "the parent has no such choice: drawn"
    assert drawn(plan, 8, 7, 7, 6) == 6, "drawn afresh, after one of the parent was skipped, and as another value"
    assert drawn(plan, 9) == 5
    assert drawn(plan, 9, 0) == 0, "the parent has no more"
    assert drawn(Plan([integer(0, 1)], {0}), 1, *[0] * 30) == 0, "in the end it is what it is"


def test_a_neighbour_has_one_choice_or_a_few_afresh_of_those_that_can_differ() -> None:
    steering, random = Steering(lambda: True), Random(0)
    assert steering.neighbour(random) is None
    steering.learn([integer(0, 0), integer(4, 9), integer(2, 9, forced=True), integer(6, 9)], {"worst": 1.0})
    for _ in range(20):
        plan = steering.neighbour(random)
        assert plan is not None
        values = [drawn(plan, most, 8) for most in (0, 9, 9)]
        assert values[0] == 0
        assert values[1:] in ([8, 6], [4, 8], [8, 8]), "a choice that was forced is forced again"
    assert Steering(lambda: False).neighbour(random) is None


def test_shrinking_ends_in_time_where_drawing_takes_long() -> None:
    """Everything with many features fails, so that Hypothesis could shrink for long."""
    drawn: list[LinearCase] = []

    def slow(case: LinearCase) -> LinearCase:
        time.sleep(0.01)
        drawn.append(case)
        return case

    subject = replace(LINEAR, cases=lambda scope: CASES.map(slow))
    bench = Scored(lambda case: float(case.in_features * case.out_features), fails=20.0)
    limits = Limits(seed=1, shrink_seconds=0.2)
    row = search(bench, subject, DESCRIPTION.scope(4, None), limits)  # type: ignore[arg-type]
    (failure,) = row.failures
    first = next(case for case in bench.cases if case.in_features * case.out_features >= 20)
    case = failure.reproducer.case
    assert 20 <= case.in_features * case.out_features <= first.in_features * first.out_features
    assert row.found_after is not None
    assert len(drawn) <= row.found_after + 40, "0.2 s hold 20 draws"
