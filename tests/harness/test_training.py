"""Data parallelism as the harness judges it: what is right holds, and each fault is told as what it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import DataParallel
from harness.bench import Bench
from harness.properties import property_of
from harness.verdict import Verdict
from reference.data_parallel import DataParallelCase, DataParallelRecipes, Layer
from reference.mesh import Mesh
from reference.recipe import Recipe

HERE = Path(__file__).parent / "candidates_for_tests" / "training.py"
DATA_PARALLEL = property_of("data_parallel")

PLAIN = DataParallelCase(
    Mesh.of(dp=2), (Layer(2), Layer(1)), 2, micro_batches=2, samples=2, length=2, counts=(2, 1, 1), dtype="fp64"
)
UNUSED = dataclasses.replace(PLAIN, layers=(Layer(2), Layer(2, "unused")))
ROUNDS = DataParallelRecipes(*[Recipe("normal")] * 3)


def verdict_of(candidate: str, case: DataParallelCase) -> Verdict:
    with Bench(candidate if candidate == "builtin" else f"{HERE}:{candidate}") as bench:
        return bench.once(DATA_PARALLEL, case).verdict


def said(verdict: Verdict) -> str:
    return "\n".join(f"{one.kind}: {one.message}; {one.cause}; {one.details}" for one in verdict.findings)


#: What the shipped candidate computes right, each a case in which a fault below shows.
CASES = {
    "plain": PLAIN,
    "unused": UNUSED,
    "buckets": dataclasses.replace(PLAIN, bucket=4),
    "overlap": dataclasses.replace(PLAIN, overlap=True, recipes=ROUNDS),
    "two axes": dataclasses.replace(PLAIN, mesh=Mesh.of(dp=2, tp=2)),
    "one axis of two": dataclasses.replace(PLAIN, mesh=Mesh.of(dp=2, tp=2), axis="tp"),
    "shape": dataclasses.replace(PLAIN, invalid="shape"),
    "order": dataclasses.replace(PLAIN, invalid="order"),
    "nothing valid": dataclasses.replace(PLAIN, counts=(0,)),
}


@pytest.fixture(scope="module")
def builtin() -> Iterator[Bench]:
    with Bench("builtin") as bench:
        yield bench


@pytest.mark.parametrize("name", CASES)
def test_the_shipped_candidate_is_right(builtin: Bench, name: str) -> None:
    verdict = builtin.once(DATA_PARALLEL, CASES[name]).verdict
    assert verdict.holds, said(verdict)


@pytest.mark.parametrize(
    ("candidate", "case", "words"),
    [
        ("Twice", "plain", "traffic: more traffic than needed: 18 elements of gradients are reduced in step 0, "),
        ("NoneOnOne", "unused", "disagree: bias1[0].grad is None on rank 0 (dp=0) and not on rank 1 (dp=1)"),
        ("NoneAtAll", "plain", "mismatch: bias0[0].grad is None on rank 0 (dp=0), although the parameter is used"),
        ("OverlapAdds", "overlap", "has other bits with overlap than without on rank 0 (dp=0)"),
        ("OtherGroup", "two axes", "traffic: gradients are reduced over another group in step 0, micro-batch 1"),
        ("LeavesHooks", "plain", "side-effect: the candidate left a hook on parameter weight0"),
        ("WrongReport", "plain", "mismatch: loss[0] differs from one process"),
        ("AcceptsAll", "shape", "parameters that differ in shape on the last rank were accepted"),
        ("AcceptsAll", "order", "parameters that differ in order on the last rank were accepted"),
        ("WrongLayout", "plain", "DataParallel(..., layout=Split(3, 'dp')) does not fit weight0, correct it"),
        ("ReturnsTheModule", "plain", "expected DataParallel(wrapped_module)"),
        ("Detached", "plain", "the loss of micro-batch 0 does not require a gradient"),
        ("DrawsNumbers", "plain", "side-effect: the candidate drew from the default random generator"),
        ("Declares", "plain", "traffic: gradients are reduced in step 0, micro-batch 1 in 1 pieces of other sizes"),
        (
            "SmallerBuckets",
            "buckets",
            "traffic: gradients are reduced in step 0, micro-batch 1 in 4 pieces of other sizes",
        ),
    ],
)
def test_a_fault_is_told(candidate: str, case: str, words: str) -> None:
    verdict = verdict_of(candidate, CASES[case])
    assert words in said(verdict), said(verdict)


LOW = dataclasses.replace(PLAIN, dtype="bf16", reduce_dtype="fp32")


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        (LOW, {"traffic"}),  # two numbers of bf16 are rounded once either way
        (dataclasses.replace(LOW, main_grad=True, recipes=ROUNDS), {"traffic"}),  # each backward has rounded as much
        (dataclasses.replace(LOW, dtype="fp32", recipes=ROUNDS), {"mismatch", "traffic"}),
        (dataclasses.replace(LOW, reduce_dtype="same"), set()),
    ],
)
def test_a_reduction_in_bf16_is_seen_by_its_traffic_and_by_values_that_are_wider(
    case: DataParallelCase, kinds: set[str]
) -> None:
    with Bench("builtin+F44") as bench:
        verdict = bench.once(DATA_PARALLEL, case).verdict
    assert {one.kind for one in verdict.findings} == kinds, said(verdict)


@pytest.mark.parametrize("case", ["unused", "nothing valid"])
def test_no_gradient_stands_for_zeros_where_all_ranks_agree(case: str) -> None:
    verdict = verdict_of("NoneEverywhere", CASES[case])
    assert verdict.holds, said(verdict)


def test_no_sync_around_backward_alone_is_seen_by_its_traffic_alone() -> None:
    """The values are right (huggingface/accelerate#1726)."""
    verdict = verdict_of("AroundBackward", PLAIN)
    assert [one.kind for one in verdict.findings] == ["traffic"], said(verdict)
    assert "9 elements of gradients are reduced in step 0, micro-batch 0, where nothing is due" in said(verdict)
    assert verdict_of("AroundBackward", dataclasses.replace(PLAIN, micro_batches=1)).holds


@pytest.mark.parametrize("changes", [{}, {"loss": "token_mean"}, {"layers": (Layer(2), Layer(2, "tied"))}])
def test_the_wrapper_of_the_documentation_holds(changes: dict[str, Any]) -> None:
    verdict = verdict_of("Simple", dataclasses.replace(PLAIN, **changes))
    assert verdict.holds, said(verdict)


@pytest.mark.parametrize(
    ("candidate", "changes"),
    [
        ("WiderWire", {"dtype": "bf16"}),
        ("PaddedReduceScatter", {"micro_batches": 1, "features": 3}),
        ("DeclaredReduceScatter", {"micro_batches": 1, "features": 3}),
        ("InTwoSteps", {"micro_batches": 1, "mesh": Mesh.of(dp=4)}),
    ],
)
def test_right_ways_to_reduce_hold(candidate: str, changes: dict[str, Any]) -> None:
    verdict = verdict_of(candidate, dataclasses.replace(PLAIN, **changes))
    assert verdict.holds, said(verdict)


def test_parts_of_the_group_must_be_declared() -> None:
    case = dataclasses.replace(PLAIN, micro_batches=1, mesh=Mesh.of(dp=4))
    words = "traffic: gradients are reduced over another group in step 0, micro-batch 0: all_reduce on group [0, 1]"
    assert words in said(verdict_of("InTwoStepsUndeclared", case))


def test_what_is_no_layout_is_refused() -> None:
    with pytest.raises(TypeError, match="is not a layout"):
        DataParallel(lambda x: x, layout="dp")  # type: ignore[arg-type, return-value]
