"""The rules of schedules: right lists break none, whatever their size, and each planted fault breaks its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import strategies.schedule
from reference.schedule import Action, Lists, ScheduleCase, ScheduleKind, lists, looped, v_shaped
from reference.schedule_formulas import idle_share, most_in_flight, place_of, span
from reference.schedule_rules import check
from reference.schedule_run import Stuck, Units, rendezvous
from reference.schedule_tables import Tables
from sharded.pipeline_schedules import schedule
from strategies.scope import Scope

OURS = ("gpipe", "gpipe_chunks", "1f1b_few", "interleaved", "interleaved_few", "interleaved_uneven")
ours = strategies.schedule.cases(Scope(features=frozenset(f"schedule_{name}" for name in OURS)))
MakesLists = Callable[[list[list[Action]]], None]


def made(case: ScheduleCase) -> list[list[Action]]:
    return [list(actions) for actions in schedule(case.kind, case.stages, case.chunks, case.micro_batches)]  # type: ignore[arg-type]


@given(ours, st.sampled_from([Units(), Units(1, 1, 0), Units(2, 1, 0), Units(3, 2, 5)]))
def test_the_shipped_schedules_break_no_rule(case: ScheduleCase, units: Units) -> None:
    found = check(case, lists(case, made(case)), units)
    assert found.broken == ()
    assert found.run is not None
    assert found.run.idle_share == idle_share(case)
    assert found.in_flight == tuple(most_in_flight(case, rank) for rank in range(case.stages))


@pytest.mark.parametrize(
    ("kind", "p", "m", "v"),
    [
        ("gpipe", 64, 256, 1),
        ("1f1b", 64, 256, 1),
        ("1f1b", 64, 1, 1),
        ("1f1b", 1, 256, 1),
        ("gpipe", 64, 1, 8),
        ("interleaved", 64, 1, 8),
        ("interleaved", 64, 65, 2),
        ("interleaved", 64, 127, 1),
        ("interleaved", 1, 256, 8),
        ("interleaved", 2, 256, 8),
        ("interleaved", 64, 256, 8),
    ],
)
def test_the_corners(kind: ScheduleKind, p: int, m: int, v: int) -> None:
    case = ScheduleCase(kind, p, m, v)
    assert check(case, lists(case, made(case))).broken == ()


def test_idle_shares_and_in_flight_of_the_papers() -> None:
    """1811.06965, section 2.3; 2104.04473, section 2.2, whose share is of the ideal time; Megatron-LM's warm-up + 1."""
    for p, v, k in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 3)):
        m = k * p
        assert idle_share(ScheduleCase("gpipe", p, m)) == Fraction(p - 1, m + p - 1)
        whole = ScheduleCase("interleaved", p, m, v)
        idle = idle_share(whole)
        assert idle == Fraction(p - 1, v * m + p - 1)
        assert idle / (1 - idle) == Fraction(p - 1, v * m)
        assert span(whole, 1, 2) == 3 * (v * m + p - 1)
    warm_up = [(4 - rank - 1) * 2 + (2 - 1) * 4 for rank in range(4)]
    assert [most_in_flight(ScheduleCase("interleaved", 4, 8, 2), rank) for rank in range(4)] == [n + 1 for n in warm_up]
    assert [most_in_flight(ScheduleCase("1f1b", 4, 3), rank) for rank in range(4)] == [3, 3, 2, 1]
    assert most_in_flight(ScheduleCase("gpipe", 4, 3, 2), 0) == 6
    assert most_in_flight(ScheduleCase("dualpipev", 2, 4, 2), 0) is None


@pytest.mark.parametrize("units", [(1, 2), (3, 2)])
def test_no_order_of_whole_backwards_is_faster_than_the_formula(units: tuple[int, int]) -> None:
    """All orders of two ranks with two micro-batches, and of one with two chunks: those that run, and their best."""
    forward, backward = units
    for p, m, v in ((2, 2, 1), (1, 2, 2), (2, 1, 1), (1, 1, 2)):
        case = ScheduleCase("gpipe", p, m, v)
        steps = [Action(kind, k, c) for kind in ("forward", "backward") for c in range(v) for k in range(m)]
        each = [list(order) for order in itertools.permutations(steps) if _backwards_last(order)]
        best = min(
            found.run.span
            for orders in itertools.product(each, repeat=p)
            if (found := check(case, lists(case, orders, receives="none"), Units(forward, backward, 0))).run is not None
        )
        assert best == span(case, forward, backward)


def _backwards_last(order: tuple[Action, ...]) -> bool:
    at = {(a.kind, a.micro_batch, a.chunk): i for i, a in enumerate(order)}
    return all(at["forward", k, c] < at["backward", k, c] for _, k, c in at)


# Planted faults. Each changes lists of 1F1B on 3 ranks with 4 micro-batches, or of interleaved 1F1B on 2 ranks.

ONE = ScheduleCase("1f1b", 3, 4)
TWO = ScheduleCase("interleaved", 2, 4, 2)


def at(actions: list[Action], kind: str, micro_batch: int, chunk: int = 0) -> int:
    return next(i for i, a in enumerate(actions) if (a.kind, a.micro_batch, a.chunk) == (kind, micro_batch, chunk))


def swap(rank: int, one: tuple[str, int], other: tuple[str, int]) -> MakesLists:
    def change(made: list[list[Action]]) -> None:
        actions = made[rank]
        i, j = at(actions, *one), at(actions, *other)
        actions[i], actions[j] = actions[j], actions[i]

    return change


def drop(rank: int, *kinds: str, micro_batch: int) -> MakesLists:
    def change(made: list[list[Action]]) -> None:
        for kind in kinds:
            del made[rank][at(made[rank], kind, micro_batch)]

    return change


def put(rank: int, position: int, action: Action) -> MakesLists:
    return lambda made: made[rank].insert(position, action)


def split(kind: str, rank: int, micro_batch: int, second: int | None) -> MakesLists:
    """The backward in two parts, the second so many places later; or only the first of them."""

    def change(made: list[list[Action]]) -> None:
        i = at(made[rank], "backward", micro_batch)
        other = "backward_weight" if kind == "backward_input" else "backward_input"
        made[rank][i] = Action(kind, micro_batch)  # type: ignore[arg-type]
        if second is not None:
            made[rank].insert(i + second, Action(other, micro_batch))  # type: ignore[arg-type]

    return change


@pytest.mark.parametrize(
    ("case", "fault", "rule", "says"),
    [
        (ONE, put(1, 2, Action("forward", 4)), "known actions", "rank 1, position 2: forward of micro-batch 4, but"),
        (ONE, put(1, 0, Action("forward", 0, 1)), "known actions", "rank 1, position 0: forward of chunk 1, but there"),
        (ONE, put(0, 0, Action("backward", -1)), "known actions", "rank 0, position 0: backward of micro-batch -1"),
        (ONE, drop(1, "forward", micro_batch=2), "forward once", "rank 1: the forward of micro-batch 2 on stage 1 is"),
        (ONE, put(2, 9, Action("forward", 1)), "forward once", "rank 2, position 9: the forward of micro-batch 1 on"),
        (ONE, drop(1, "backward", micro_batch=0), "backward once", "rank 1: the backward of micro-batch 0 on stage 1"),
        (ONE, put(2, 9, Action("backward", 0)), "backward once", "rank 2, position 9: the backward of micro-batch 0"),
        (ONE, put(2, 9, Action("backward_input", 0)), "backward once", "comes beside a whole backward of it (position"),
        (ONE, split("backward_input", 1, 0, None), "backward once", "rank 1: the backward to the weights of micro-"),
        (ONE, split("backward_weight", 1, 0, None), "backward once", "rank 1: the backward to the input of micro-b"),
        (ONE, swap(2, ("forward", 1), ("backward", 1)), "order on a rank", "rank 2, position 5: the backward of micro"),
        (ONE, split("backward_weight", 1, 0, 1), "order on a rank", "the backward to the weights of micro-batch 0 on"),
        (ONE, drop(0, "send_forward", micro_batch=2), "messages once", "rank 0: the send of the activation of micro-b"),
        (ONE, drop(2, "recv_forward", micro_batch=2), "messages once", "rank 2: the receive of the activation of mic"),
        (
            ONE,
            put(1, 0, Action("recv_forward", 0)),
            "messages once",
            "rank 1, position 1: the receive of the activatio",
        ),
        (ONE, put(2, 0, Action("send_forward", 0)), "messages once", "has no other end: there is no stage after it"),
        (ONE, swap(1, ("recv_forward", 1), ("forward", 1)), "received first", "comes before its activation is receiv"),
        (ONE, swap(0, ("send_forward", 1), ("forward", 1)), "computed first", "rank 0, position 2: the send of the ac"),
        (ONE, swap(1, ("recv_forward", 1), ("recv_forward", 0)), "received first", "rank 1, position 1: the forward"),
        (ONE, swap(2, ("send_backward", 0), ("send_backward", 1)), "computed first", "rank 2, position 3: the send o"),
        (TWO, put(0, 0, Action("recv_forward", 0, 0)), "messages once", "there is no stage before it"),
    ],
)
def test_a_planted_fault_is_found_by_its_rule(case: ScheduleCase, fault: MakesLists, rule: str, says: str) -> None:
    found = made(case)
    fault(found)
    broken = check(case, lists(case, found)).broken
    assert rule in [b.rule for b in broken]
    first = next(b for b in broken if b.rule == rule)
    assert says in first.message, first.message
    if first.position is not None:
        assert f"rank {first.rank}, position {first.position}: " in first.message


def test_messages_received_in_another_order_than_they_are_sent() -> None:
    """Both come before they are needed, and are what the rank takes them for only if messages had tags."""
    found = made(ScheduleCase("gpipe", 2, 2))
    first, second = at(found[1], "recv_forward", 0), at(found[1], "recv_forward", 1)
    found[1].insert(first, found[1].pop(second))
    (broken,) = check(ScheduleCase("gpipe", 2, 2), lists(ScheduleCase("gpipe", 2, 2), found)).broken
    assert broken.rule == "matching order"
    assert (broken.rank, broken.position) == (1, 0)
    assert broken.message == (
        "rank 1, position 0: the receive of the activation of micro-batch 1 on stage 1 meets the send of the "
        "activation of micro-batch 0 on stage 0 (rank 0, position 1): both are number 1 of the messages from rank 0 to "
        "rank 1 (and 1 more)"
    )


def test_a_message_between_stages_of_one_rank_has_no_other_end() -> None:
    case = ScheduleCase("gpipe", 1, 1, 2)
    found = [[Action("forward", 0, 0), Action("send_forward", 0, 0), Action("forward", 0, 1)]]
    found[0] += [Action("backward", 0, 1), Action("backward", 0, 0)]
    (broken,) = check(case, lists(case, found)).broken
    assert broken.message.endswith("has no other end: the stage after it is on the same rank")


def test_ranks_that_wait_for_each_other_are_named() -> None:
    """Rank 0 wants a gradient before it sends the activation that this gradient needs."""
    case = ScheduleCase("gpipe", 2, 1)
    first = [Action("forward", 0), Action("recv_backward", 0), Action("send_forward", 0), Action("backward", 0)]
    last = [Action("recv_forward", 0), Action("forward", 0), Action("backward", 0), Action("send_backward", 0)]
    (broken,) = check(case, lists(case, [first, last])).broken
    assert (broken.rule, broken.rank, broken.position) == ("progress", 0, 1)
    assert broken.message == (
        "no rank can go on: rank 0 waits at position 1, the receive of the gradient of micro-batch 0 on stage 0; "
        "rank 1 waits at position 0, the receive of the activation of micro-batch 0 on stage 1"
    )
    # A receive that is only posted does not stop the send after it.
    assert check(case, lists(case, [first, last], receives="posted")).broken == ()


def test_stages_of_one_rank_in_the_wrong_order_wait_for_ever() -> None:
    case = ScheduleCase("gpipe", 1, 1, 2)
    found = [[Action("forward", 0, 1), Action("forward", 0, 0), Action("backward", 0, 1), Action("backward", 0, 0)]]
    (broken,) = check(case, lists(case, found)).broken
    assert (broken.rule, broken.position) == ("progress", 0)


def test_orders_without_messages_wait_for_what_is_computed() -> None:
    case = ScheduleCase("gpipe", 2, 2)
    orders = [[Action(kind, k) for kind, k in ranks] for ranks in _CROSSED]
    (broken,) = check(case, lists(case, orders, receives="none")).broken
    assert (broken.rule, broken.rank, broken.position) == ("progress", 0, 1)


#: Rank 0 wants the gradient of 0 before it computes 1, rank 1 the activation of 1 before it computes that gradient.
_CROSSED = (
    (("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)),
    (("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)),
)


def test_too_many_in_flight() -> None:
    """The lists of GPipe, which are as fast as those of 1F1B."""
    case = ScheduleCase("1f1b", 2, 3)
    (broken,) = check(case, lists(case, made(replace(case, kind="gpipe")))).broken
    peak = "3 activations are in flight, and 3 at the peak"
    assert broken.message == f"rank 0, position 4: {peak}; 1f1b holds at most 2 there"
    assert broken.rule == "in flight"


def test_the_place_of_a_rank_is_that_of_its_stages() -> None:
    case = ScheduleCase("interleaved", 3, 6, 2)
    assert [place_of(case, stages) for stages in ((0, 3), (4, 1), (2, 5))] == [0, 1, 2]
    assert place_of(case, (0, 5)) is None
    assert [most_in_flight(case, place) for place in (0, 2, None)] == [8, 4, None]
    numbered_backwards = tuple(stages for stages in case.placement[::-1])
    found = check(case, lists(case, made(case)[::-1], numbered_backwards))
    assert found.broken == ()
    crossed = ((0, 4), (1, 3), (2, 5))
    assert most_in_flight(case, place_of(case, crossed[0])) is None, "no formula, and no verdict"


def test_a_rank_that_is_idle_for_longer() -> None:
    """A backward that is waited for before the next forward: nothing is wrong but the time."""
    case = ScheduleCase("1f1b", 2, 2)
    first = [Action(kind, k) for k in range(2) for kind in ("forward", "backward")]
    (broken,) = check(case, lists(case, [first, first], receives="none")).broken
    assert broken.rule == "idle share"
    assert broken.message == (
        "ranks are idle for 1/2 (50.0 %) of the time (12 units with forward 1, backward 2); expected for 1f1b: "
        "1/3 (33.3 %) (9 units)"
    )


def test_split_backwards_may_be_faster_and_must_not_be_slower() -> None:
    """Weights are left for the end: rank 1 sends its gradients sooner."""
    orders = [
        ["forward 0", "forward 1", "backward_input 0", "backward_weight 0", "backward_input 1", "backward_weight 1"],
        ["forward 0", "backward_input 0", "forward 1", "backward_input 1", "backward_weight 0", "backward_weight 1"],
    ]
    case = ScheduleCase("interleaved_zero_bubble", 2, 2)
    parts = [[Action(kind, int(k)) for kind, k in map(str.split, order)] for order in orders]  # type: ignore[arg-type]
    found = check(case, lists(case, parts, receives="none"))
    assert found.broken == ()
    assert found.run is not None
    assert found.run.span < span(case, 1, 2)
    slow = [Action(kind, k) for k in range(2) for kind in ("forward", "backward_input", "backward_weight")]
    (broken,) = check(case, lists(case, [slow, slow], receives="none")).broken
    assert "expected for interleaved_zero_bubble: at most 1/3" in broken.message


def test_an_activation_is_held_until_the_weights_have_their_gradient() -> None:
    parts = ("forward", "backward_input", "forward", "backward_weight", "backward_input", "backward_weight")
    actions = [Action(kind, k) for kind, k in zip(parts, (0, 0, 1, 0, 1, 1), strict=True)]  # type: ignore[arg-type]
    case = ScheduleCase("interleaved_zero_bubble", 1, 2)
    assert check(case, lists(case, [actions])).in_flight == (2,)


def test_sends_that_wait_stop_schedules_of_several_chunks() -> None:
    """Where all ranks send ahead and none receives: once every rank holds two messages."""
    for kind, v in (("gpipe", 1), ("1f1b", 1), ("gpipe", 2), ("interleaved", 2), ("interleaved", 3)):
        for p, m in itertools.product(range(1, 5), range(1, 11)):
            case = ScheduleCase(kind, p, m, v)  # type: ignore[arg-type]
            stuck = rendezvous(Tables.of(lists(case, made(case))))
            assert (stuck is not None) == (v > 1 and p > 1 and m >= 2 * p), case


def test_sends_and_receives_that_stand_together_are_posted_together() -> None:
    """Rank 0 sends its second activation when rank 1 sends its first gradient: one after the other, both would wait."""
    case = ScheduleCase("gpipe", 2, 2)
    first = made(case)[0]
    kinds = ("recv_forward", "forward", "backward", "send_backward")
    last = [Action(kind, k) for k in range(2) for kind in kinds]  # type: ignore[arg-type]
    assert [a.kind for a in first[at(first, "send_forward", 1) :][:2]] == ["send_forward", "recv_backward"]
    assert [a.kind for a in last[at(last, "send_backward", 0) :][:2]] == ["send_backward", "recv_forward"]
    assert rendezvous(Tables.of(lists(case, [first, last]))) is None
    # A computation between them: rank 1 sends its second gradient, rank 0 its fourth activation, and neither receives.
    case = ScheduleCase("gpipe", 2, 4)
    last = [Action(kind, k) for k in range(3) for kind in ("recv_forward", "forward")]  # type: ignore[arg-type]
    last += [Action(kind, k) for k in range(3) for kind in ("backward", "send_backward")]  # type: ignore[arg-type]
    last += [Action(kind, 3) for kind in kinds]  # type: ignore[arg-type]
    both = lists(case, [made(case)[0], last])
    stuck = rendezvous(Tables.of(both))
    assert isinstance(stuck, Stuck)
    assert stuck.message == (
        "no rank can go on: rank 0 waits at position 7, the send of the activation of micro-batch 3 on stage 0; "
        "rank 1 waits at position 9, the send of the gradient of micro-batch 1 on stage 1"
    )
    assert "progress" not in [b.rule for b in check(case, both).broken]


def test_a_v_has_other_borders_and_other_neighbours() -> None:
    """Rank 1 of 2 has stages 1 and 2: between them nothing is sent."""
    case = ScheduleCase("zbv", 2, 1, 2)
    assert case.placement == ((0, 3), (1, 2)) == v_shaped(2)
    first = ["forward 0", "send_forward 0", "recv_forward 1", "forward 1", "backward 1", "send_backward 1"]
    first += ["recv_backward 0", "backward 0"]
    last = ["recv_forward 0", "forward 0", "forward 1", "send_forward 1", "recv_backward 1", "backward 1"]
    last += ["backward 0", "send_backward 0"]
    orders = [[Action(kind, 0, int(c)) for kind, c in map(str.split, order)] for order in (first, last)]  # type: ignore[arg-type]
    assert check(case, lists(case, orders)).broken == ()
    looped_too = check(case, lists(case, orders, looped(2, 2))).broken
    assert {b.rule for b in looped_too} == {"messages once"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("1f1b", 2, 0), "micro_batches is 0: expected a whole number of at least 1"),
        (("1f1b", 2, 2, 2), "1f1b has one chunk a rank, not 2"),
        (("zbv", 2, 2, 1), "zbv has two chunks a rank, not 1"),
        (("gpipe", -1, 2), "stages is -1"),
        (("pipe", 1, 2), "unknown schedule 'pipe'"),
    ],
)
def test_cases_that_cannot_be(arguments: tuple[ScheduleKind, int, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ScheduleCase(*arguments)


@pytest.mark.parametrize(
    ("actions", "placement", "says"),
    [
        ([[], []], None, "there are 2 lists: expected one for each of the 1 ranks"),
        ([[Action("forward", 0), Action("jump", 0)]], None, "rank 0, position 1: Action\\(kind='jump'"),  # type: ignore[arg-type]
        ([[Action("forward", 0.5)]], None, "position 0: .* is no action"),  # type: ignore[arg-type]
        ([["forward"]], None, "position 0: 'forward' is no action"),
        ([[]], ((0, 0),), "the placement gives 2 stages to each of 1 ranks: expected 1 on each of 1"),
        ([[]], ((1,),), "the placement has stages \\[1\\]: expected each of 0 to 0 once"),
    ],
)
def test_lists_that_cannot_be_read(actions: list[list[Action]], placement: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        lists(ScheduleCase("gpipe", 1, 1), actions, placement)  # type: ignore[arg-type]


def test_an_empty_list_lacks_everything() -> None:
    case = ScheduleCase("gpipe", 2, 3)
    broken = check(case, lists(case, [[], []])).broken
    assert [b.message for b in broken] == [
        "rank 0: the forward of micro-batch 0 on stage 0 is missing (and 5 more)",
        "rank 0: the backward of micro-batch 0 on stage 0 is missing (and 5 more)",
    ]
    assert isinstance(lists(case, [[], []]), Lists)
