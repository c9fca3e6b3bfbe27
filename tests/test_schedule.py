"""Pipeline schedules of the shipped candidates, and what becomes of those that are wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trials import candidate

from harness import cases, check, verify
from harness.bench import Bench
from harness.properties import property_of
from harness.verdict import Verdict
from reference.schedule import ScheduleCase, ScheduleKind


@pytest.mark.parametrize("name", ["builtin", "torch", "megatron-core"])
@given(data=st.data())
def test_schedules_keep_the_rules(name: str, data: st.DataObject) -> None:
    if name == "megatron-core":
        pytest.importorskip("megatron.core")
    check("schedule", name, data.draw(cases("schedule", name)))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_warm_up_that_is_not_limited_by_the_micro_batches_is_found(seed: int) -> None:
    (row,) = verify("builtin+F50", subjects=["schedule"], examples=200, seed=seed, save=None).rows
    assert row.result == "fault"
    (failure,) = row.failures
    assert failure.reproducer.case == ScheduleCase("1f1b", 2, 1)
    first = failure.verdict.findings[0]
    assert first.message.startswith("rank 0, position 4: recv_backward of micro-batch 1, but there is 1 micro-batch")
    assert first.cause == "the warm-up takes as many micro-batches as stages follow, also where there are only 1"


def verdict_on(name: str, case: ScheduleCase) -> Verdict:
    with Bench(candidate(f"scheduling.py:{name}")) as bench:
        return bench.check(property_of("schedule"), case).verdict


CASE = ScheduleCase("1f1b", 3, 2)


def test_an_adapter_of_orders_alone_holds() -> None:
    for name in ("Right", "Numpy", "Backwards"):
        assert verdict_on(name, CASE).holds, name
    assert verdict_on("Right", ScheduleCase("gpipe", 2, 2)).rejected == "1F1B only"
    assert verdict_on("NoneAtAll", CASE).rejected == "it has no 1f1b schedule"


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("ListsAlone", "mismatch", "rank 0: the send of the activation of micro-batch 0 on stage 0 is missing"),
        ("NoLists", "error", "the adapter does not fit on rank 0: schedule returned 3; expected lists of actions"),
        ("Text", "error", "schedule returned 'F0 F1 B0'; expected lists of actions"),
        ("Misspelt", "error", "receives is 'waits': expected one of wait, posted, none"),
        ("MessagesThoughNone", "error", "rank 1, position 0: a recv_forward, although receives is 'none'"),
        ("NoActions", "error", "cannot be read: rank 0, position 0: 'forward' is no action"),
        ("Misplaced", "error", "the placement has stages [0, 0, 0]: expected each of 0 to 2 once"),
        ("Raises", "error", "the candidate raised in schedule on rank 0: RuntimeError: no such luck"),
        ("Uncounted", "mismatch", "rank 0, position 4: backward of micro-batch 2, but there are 2 micro-batches"),
        ("AllForwardsFirst", "mismatch", "rank 2, position 1: 2 activations are in flight"),
    ],
)
def test_what_is_wrong_is_said(name: str, kind: str, says: str) -> None:
    verdict = verdict_on(name, CASE)
    assert verdict.kind == kind
    assert says in verdict.findings[0].message, verdict.findings[0].message
    assert verdict.findings[0].place in ("rank 0 (pp=0)", "rank 2 (pp=2)", None)


@pytest.mark.parametrize(
    ("kind", "stages", "micro_batches", "chunks", "units"),
    [
        ("interleaved_zero_bubble", 4, 8, 2, 3),
        ("zbv", 4, 8, 2, 3),
        ("dualpipev", 4, 8, 2, 6),
    ],
)
def test_zero_bubble_schedules_are_idle_for_less(
    kind: ScheduleKind, stages: int, micro_batches: int, chunks: int, units: int
) -> None:
    """Whole backwards leave each rank idle for 9 units."""
    case = ScheduleCase(kind, stages, micro_batches, chunks)
    with Bench("torch") as bench:
        verdict = bench.check(property_of("schedule"), case).verdict
    assert verdict.holds
    run = verdict.facts["checked"].run
    assert run.span - run.busy[0] == units


def test_megatron_groups_micro_batches_as_the_shipped_schedule_does() -> None:
    pytest.importorskip("megatron.core")
    case = ScheduleCase("interleaved", 4, 10, 2)
    found = []
    for name in ("builtin", "megatron-core"):
        with Bench(name) as bench:
            facts = bench.check(property_of("schedule"), case).verdict.facts
        found.append([actions[actions[:, 0] <= 1].tolist() for actions in facts["lists"].actions])
    assert found[0] == found[1]
