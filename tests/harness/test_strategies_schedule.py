"""What is drawn of schedules: nothing outside the scope, everything inside, and down to the smallest."""

from __future__ import annotations

from functools import cache

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strategies.schedule
from harness.draws import register
from reference.schedule import ScheduleCase
from strategies.schedule import FEATURES, MOST_CHUNKS, MOST_MICRO_BATCHES, MOST_STAGES, simpler
from strategies.scope import Scope

FULL = Scope(features=frozenset(FEATURES))
scopes = st.builds(
    Scope,
    largest_mesh=st.integers(1, 80),
    features=st.sets(st.sampled_from(list(FEATURES))).map(frozenset),
)


def used(case: ScheduleCase) -> set[str]:
    """The optional features that a case needs."""
    few, uneven = case.micro_batches < case.stages, case.micro_batches % case.stages > 0
    needs = {f"schedule_{case.kind}"} - {"schedule_1f1b"}
    if case.kind == "gpipe" and case.chunks > 1:
        needs.add("schedule_gpipe_chunks")
    if case.kind == "1f1b" and few:
        needs.add("schedule_1f1b_few")
    if case.kind.startswith("interleaved") and uneven:
        needs.add("schedule_interleaved_few" if few else "schedule_interleaved_uneven")
    return needs


def inside(case: ScheduleCase, scope: Scope) -> bool:
    sizes = case.stages <= min(MOST_STAGES, scope.largest_mesh) and case.chunks <= MOST_CHUNKS
    enough = case.kind != "dualpipev" or case.micro_batches >= 2 * case.stages
    return sizes and enough and case.micro_batches <= MOST_MICRO_BATCHES and used(case) <= scope.features


@given(scopes, st.data())
def test_cases_and_simpler_ones_are_inside_the_scope(scope: Scope, data: st.DataObject) -> None:
    case = data.draw(strategies.schedule.cases(scope))
    assert inside(case, scope), case
    for less in simpler(case, scope):
        assert inside(less, scope), less
        assert less.kind == case.kind
        assert (less.stages, less.chunks, less.micro_batches) != (case.stages, case.chunks, case.micro_batches)


@cache
def sample() -> list[ScheduleCase]:
    """A thousand cases, always the same."""
    found: list[ScheduleCase] = []

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=1000,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(hypothesis.Phase.generate,),
        suppress_health_check=list(hypothesis.HealthCheck),
        backend=register(),
    )
    @given(strategies.schedule.cases(FULL))
    def collect(case: ScheduleCase) -> None:
        found.append(case)

    collect()
    return found


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_drawn(feature: str) -> None:
    assert sum(feature in used(case) for case in sample()) >= 20


def test_sizes_are_drawn_up_to_the_largest_and_from_the_smallest() -> None:
    assert {case.stages for case in sample()} >= {1, 2, 3, 4, 8}
    assert max(case.stages for case in sample()) > 48
    assert max(case.chunks for case in sample()) == MOST_CHUNKS
    assert max(case.micro_batches for case in sample()) > 200
    assert sum(case.stages * case.chunks * case.micro_batches > 4000 for case in sample()) > 20


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev"])
def test_shrinking_ends_at_the_smallest_case_of_a_kind(kind: str) -> None:
    case = max((c for c in sample() if c.kind == kind), key=lambda c: c.stages * c.micro_batches)
    for _ in range(20):
        case = next(iter(simpler(case, FULL)), case)
    assert (case.stages, case.micro_batches) == (1, 2 if kind == "dualpipev" else 1)
    assert case.chunks == (2 if kind in ("zbv", "dualpipev") else 1)
