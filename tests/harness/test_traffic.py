"""The verdict on traffic: more than needed, another dtype, another order on some rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from trials import candidate

from harness.bench import Bench
from harness.observation import Observation, Sent
from harness.properties import property_of
from harness.properties.traffic import judge_traffic
from harness.world.traffic import Collective
from reference.linear import LinearCase
from reference.linear_traffic import needed, with_input_gradient, with_output_gradient
from reference.mesh import Mesh
from reference.traffic import Transfer
from reference.transformer import TransformerCase
from reference.transformer_traffic import needed as needed_by_transformer

TP = Mesh.of(tp=2)
REDUCE = Transfer("forward", 0, "all_reduce", "tp", 12, "float32")
GATHER = Transfer("backward", 0, "all_gather", "tp", 6, "float32", least=4)


def sent(due: Transfer, group: tuple[int, ...] = (0, 1), **changes: object) -> Sent:
    operation = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    name = operation.get(due.operation, due.operation)
    made = Collective(name, group, due.dtype, due.elements, 4 * due.elements)
    return Sent(due.phase, due.micro_batch, dataclasses.replace(made, **changes))


def judged(*ranks: Sequence[Sent], due: Sequence[Transfer] = (REDUCE, GATHER), mesh: Mesh = TP) -> list[str]:
    observed = [Observation(sent=tuple(one)) for one in ranks]
    findings = list(judge_traffic(mesh, due, observed))
    assert all(finding.kind == "traffic" for finding in findings)
    return [finding.message for finding in findings]


RIGHT = [sent(REDUCE), sent(GATHER)]


def test_what_is_needed_holds() -> None:
    assert judged(RIGHT, RIGHT) == []
    assert judged(RIGHT[::-1], RIGHT[::-1]) == [], "phases follow each other as the micro-batches do"
    assert judged([], [], due=()) == []


def test_the_shorter_piece_of_an_uneven_cut_may_travel_as_it_is() -> None:
    shorter = [sent(REDUCE), sent(GATHER, elements=4)]
    assert judged(RIGHT, shorter) == []


def test_a_group_of_one_rank_moves_nothing() -> None:
    extra = [[*RIGHT, sent(REDUCE, group=(rank,))] for rank in range(2)]
    assert judged(*extra) == []


@pytest.mark.parametrize(
    "extra",
    [
        sent(REDUCE),
        sent(REDUCE, operation="broadcast"),
        sent(dataclasses.replace(REDUCE, phase="backward")),
        sent(dataclasses.replace(REDUCE, micro_batch=1)),
        sent(dataclasses.replace(GATHER, elements=7)),
    ],
)
def test_more_than_needed_is_said(extra: Sent) -> None:
    (message,) = judged([*RIGHT, extra], [*RIGHT, extra])
    assert message.startswith("more traffic than needed in the ")
    assert extra.collective.operation in message


def test_a_larger_payload_is_more() -> None:
    larger = [sent(REDUCE, elements=13), sent(GATHER)]
    more, missing = judged(larger, larger)
    assert "13 elements" in more
    assert (
        missing == "no traffic where some is needed: forward of micro-batch 0: all_reduce over tp, float32, 12 elements"
    )


@pytest.mark.parametrize("elements", [0, 1, 11])
def test_a_smaller_payload_is_not_what_is_needed(elements: int) -> None:
    smaller = [sent(REDUCE, elements=elements), sent(GATHER)]
    assert len(judged(smaller, smaller)) == 2


def test_the_smallest_that_fits_is_taken() -> None:
    """A layer that gathers its bias before its output does what is needed."""
    case = LinearCase(TP, "column", 3, 4, ((5,),), bias=True, skip_bias_add=True, gather_output=True)
    due = [one for one in needed(case) if one.phase == "forward"]
    assert [one.elements for one in due] == [10, 2]
    for order in (due, due[::-1]):
        ranks = [[sent(one) for one in order]] * 2
        assert judged(*ranks, due=due) == []


def test_another_dtype_is_said_as_that() -> None:
    doubled = [sent(REDUCE, dtype="float64"), sent(GATHER)]
    (message,) = judged(doubled, doubled)
    assert message.startswith("another dtype than asked in the forward of micro-batch 0: all_reduce")
    assert message.endswith("float64, 12 elements, where float32 is due")


def test_what_is_missing_is_said_unless_it_is_optional() -> None:
    (message,) = judged(RIGHT[:1], RIGHT[:1])
    assert message.startswith("no traffic where some is needed: backward of micro-batch 0: all_gather over tp")
    assert judged(RIGHT[:1], RIGHT[:1], due=(REDUCE, dataclasses.replace(GATHER, optional=True))) == []


def test_the_group_must_be_that_of_the_axis() -> None:
    mesh = Mesh.of(tp=2, dp=2)
    right = [[sent(REDUCE, group=(0, 1))]] * 2 + [[sent(REDUCE, group=(2, 3))]] * 2
    assert judged(*right, due=(REDUCE,), mesh=mesh) == []
    everyone = [[sent(REDUCE, group=(0, 1, 2, 3))]] * 4
    assert len(judged(*everyone, due=(REDUCE,), mesh=mesh)) == 2, "one too many, and one too few"


def test_another_order_on_one_rank_is_said() -> None:
    first, second = sent(REDUCE), sent(REDUCE, operation="broadcast")
    found = judged([first, second], [second, first], due=())
    assert found[0].startswith("ranks 0 and 1 do not take part in the same collectives: all_reduce")
    assert judged([first], [], due=(dataclasses.replace(REDUCE, optional=True),)) != []
    mesh = Mesh.of(tp=2, dp=2)
    apart = [[sent(REDUCE, group=(0, 1))], [sent(REDUCE, group=(0, 1))], [], []]
    assert "same collectives" not in " ".join(judged(*apart, due=(), mesh=mesh)), "ranks that do not meet may differ"


def test_threads_of_their_own_keep_the_order_of_each_group_only() -> None:
    mesh = Mesh.of(tp=2, dp=2)
    of_tp, of_dp = sent(REDUCE, group=(0, 1), aside=True), sent(REDUCE, group=(0, 1, 2, 3))
    apart = [[of_tp, of_dp], [of_dp, of_tp], [of_dp], [of_dp]]
    assert "same collectives" not in " ".join(judged(*apart, due=(), mesh=mesh))
    alone = [
        [dataclasses.replace(one, collective=dataclasses.replace(one.collective, aside=False)) for one in rank]
        for rank in apart
    ]
    assert "same collectives" in " ".join(judged(*alone, due=(), mesh=mesh))
    crossed = sent(REDUCE, group=(0, 1), aside=True, operation="broadcast")
    assert "same collectives" in judged([of_tp, crossed], [crossed, of_tp], due=())[0]


def test_a_candidate_may_declare_what_it_does_instead() -> None:
    more = Transfer("backward", 0, "all_reduce", "tp", 3, "float32")
    observed = [Observation(sent=(*RIGHT, sent(more)), due=(REDUCE, GATHER, more))] * 2
    assert list(judge_traffic(TP, (REDUCE, GATHER), observed)) == []
    undeclared = [dataclasses.replace(one, due=None) for one in observed]
    assert list(judge_traffic(TP, (REDUCE, GATHER), undeclared)) != []


def test_tensors_that_are_held_otherwise_need_other_traffic() -> None:
    """A layer that takes partial sums, or gathers its output: only what the candidate declares can be compared."""
    extra = (*RIGHT, sent(dataclasses.replace(REDUCE, micro_batch=1)))
    departing = [Observation(sent=extra, due=(REDUCE, GATHER), departs=True)] * 2
    assert list(judge_traffic(TP, (REDUCE, GATHER), departing)) == []
    declared = [dataclasses.replace(one, due=(REDUCE,)) for one in departing]
    assert list(judge_traffic(TP, (REDUCE, GATHER), declared)) != []


def test_layers_that_do_not_look_who_trains_declare_what_they_reduce() -> None:
    column = LinearCase(TP, "column", 3, 4, ((5,),), input_requires_grad=False)
    assert needed(column) == ()
    assert with_input_gradient(column, ()) == (Transfer("backward", 0, "all_reduce", "tp", 15, "float32"),)
    row = LinearCase(
        TP,
        "row",
        4,
        3,
        ((4,),),
        bias=True,
        sequence_parallel=True,
        input_requires_grad=False,
        weight_requires_grad=False,
    )
    gathers = with_output_gradient(row, needed(row))
    assert set(gathers) - set(needed(row)) == {Transfer("backward", 0, "all_gather", "tp", 6, "float32")}


ROW = LinearCase(TP, "row", 4, 3, ((2,), (3,)))


def test_right_values_with_more_traffic_are_a_fault_on_ranks() -> None:
    with Bench(candidate("chatty.py:Twice")) as bench:
        verdict = bench.once(property_of("linear"), ROW).verdict
    assert verdict.kind == "traffic"
    assert (
        "more traffic than needed in the forward of micro-batch 0: all_reduce on group [0, 1], float32, 3 elements"
        in (verdict.findings[0].message)
    )
    with Bench(candidate("chatty.py:Declared")) as bench:
        assert bench.once(property_of("linear"), ROW).verdict.holds


LAYER = TransformerCase(Mesh.of(tp=2), 8, 2, 2, 4, leading=((4, 3),))


def counts(case: TransformerCase) -> dict[str, list[tuple[str, int, bool]]]:
    """By phase: the collectives with their elements, and whether they are optional."""
    found: dict[str, list[tuple[str, int, bool]]] = {}
    for one in needed_by_transformer(case):
        if one.phase != "finish":
            found.setdefault(one.phase, []).append((one.operation, one.elements, one.optional))
    return found


def test_a_transformer_layer_needs_two_all_reduces_each_way() -> None:
    reduce = ("all_reduce", 4 * 3 * 8, False)
    assert counts(LAYER) == {"forward": [reduce] * 2, "backward": [reduce] * 2}
    assert counts(dataclasses.replace(LAYER, backward="never")) == {"forward": [reduce] * 2}
    assert needed_by_transformer(dataclasses.replace(LAYER, mesh=Mesh.of(tp=1, dp=2))) == ()


def test_under_sequence_parallelism_it_needs_gathers_and_reduce_scatters() -> None:
    gather, scatter, again = ("all_gather", 48, False), ("reduce_scatter", 96, False), ("all_gather", 48, True)
    sequence = dataclasses.replace(LAYER, sequence_parallel=True)
    assert counts(sequence) == {
        "forward": [gather, scatter] * 2,
        "backward": [*[gather, scatter] * 2, again, again],
    }


def test_full_recomputation_may_repeat_the_forward() -> None:
    extra = ("all_reduce", 96, True)
    assert counts(dataclasses.replace(LAYER, recompute="full"))["backward"][2:] == [extra] * 2
    assert counts(dataclasses.replace(LAYER, recompute="selective")) == counts(LAYER)


@pytest.mark.parametrize("changes", [{}, {"sequence_parallel": True}, {"recompute": "full"}, {"kv_heads": 1}])
def test_the_shipped_layer_does_just_that(changes: dict[str, object]) -> None:
    case = dataclasses.replace(LAYER, **changes)
    with Bench("builtin") as bench:
        assert bench.once(property_of("transformer"), case).verdict.holds
    with Bench(candidate("chatty.py:Layer")) as bench:
        verdict = bench.once(property_of("transformer"), case).verdict
    assert verdict.kind == "traffic"
    assert verdict.findings[0].message.startswith(
        "more traffic than needed in the forward of micro-batch 0: all_reduce"
    )
