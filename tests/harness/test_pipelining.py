"""Pipelines as the harness judges them: what is right holds, and each fault is told as what it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_training import said

from harness.bench import Bench
from harness.oracle.diagnose import POSSIBLE
from harness.properties import property_of
from harness.properties.pipeline_suspects import without_tying
from harness.verdict import Finding, Verdict
from reference.mesh import Mesh
from reference.pipeline import Block, PipelineCase, PipelineRecipes
from reference.recipe import Recipe

HERE = Path(__file__).parent / "candidates_for_tests" / "pipelines.py"
PIPELINE = property_of("pipeline")

PLAIN = PipelineCase(
    Mesh.of(pp=2),
    schedule="1f1b",
    blocks=(Block(bias=True), Block()),
    depths=(2,),
    widths=(2,),
    sizes=(1, 2, 1, 1),
    length=2,
    counts=(2, 1, 0, 1),
    dtype="fp64",
)
ROUNDS = dataclasses.replace(
    PLAIN, recipes=PipelineRecipes(*[Recipe("normal")] * 3), blocks=(Block(activation="tanh", bias=True),)
)
DROPS = dataclasses.replace(PLAIN, blocks=(Block(), Block("dropout")))
TIED = dataclasses.replace(PLAIN, blocks=(Block(), Block(bias=True), Block("tied"), Block()), depths=(2, 1))

CASES = {
    "plain": PLAIN,
    "gpipe": dataclasses.replace(PLAIN, schedule="gpipe"),
    "tied": TIED,
    "drops": DROPS,
    "drops, recomputed": dataclasses.replace(DROPS, recompute=True),
    "rounds": ROUNDS,
    "rounds, recomputed": dataclasses.replace(ROUNDS, recompute=True),
    "means": dataclasses.replace(PLAIN, loss="token_mean", dtype="fp32"),
    "two axes": dataclasses.replace(PLAIN, mesh=Mesh.of(dp=2, pp=2)),
    "sharded": dataclasses.replace(TIED, mesh=Mesh.of(dp=2, pp=2), update="sharded"),
    "chunks": dataclasses.replace(PLAIN, schedule="interleaved", chunks=2, skip="every", ids=True),
    "many": dataclasses.replace(PLAIN, sizes=(1,) * 10),
    "none": dataclasses.replace(PLAIN, invalid="no_micro_batches", sizes=()),
    "small": dataclasses.replace(PLAIN, invalid="small_batch", sizes=(1, 0)),
    "more chunks": dataclasses.replace(PLAIN, invalid="chunks"),
    "shape": dataclasses.replace(PLAIN, invalid="shape"),
    "dtype": dataclasses.replace(PLAIN, invalid="dtype"),
    "raises": dataclasses.replace(PLAIN, invalid="raises"),
}


@pytest.fixture(scope="module")
def benches() -> Iterator[dict[str, Bench]]:
    found: dict[str, Bench] = {}
    yield found
    for bench in found.values():
        bench.__exit__(None, None, None)


def verdict_of(benches: dict[str, Bench], candidate: str, name: str) -> Verdict:
    spec = candidate if candidate.startswith("builtin") else f"{HERE}:{candidate}"
    if spec not in benches:
        benches[spec] = Bench(spec).__enter__()
    case = CASES[name]
    worlds = PIPELINE.runs(case, benches[spec].description)
    assert len(worlds) == 1 + (case.recompute and not case.invalid)
    return benches[spec].check(PIPELINE, case).verdict if case.recompute else benches[spec].once(PIPELINE, case).verdict


@pytest.mark.parametrize("name", CASES)
def test_the_shipped_candidate_is_right(benches: dict[str, Bench], name: str) -> None:
    verdict = verdict_of(benches, "builtin", name)
    assert verdict.holds, said(verdict)


@pytest.mark.parametrize(
    ("candidate", "case", "words"),
    [
        ("ReturnsTheStages", "plain", "expected Pipeline(step)"),
        ("NoLoss", "plain", "loss[0] is None on the rank of the last stage"),
        ("LossEverywhere", "plain", "on a rank without the last stage; expected None"),
        ("AcceptsAll", "none", "a batch of no micro-batches were accepted"),
        ("AcceptsAll", "raises", "a stage that raises were accepted"),
        ("AnotherError", "raises", "a stage raised, and rank 0 (pp=0) ends with another error"),
        ("DrawsNumbers", "plain", "drew from the default random generator"),
        ("ChangesTheInput", "plain", "changed input[0] in place"),
        ("SendsMore", "plain", "more traffic than needed: rank 0 (pp=0) sends 1 float32 elements to pp=1, where 0"),
        ("Reduces", "plain", "no such reduction along pp is due"),
        ("Switches", "plain", "left gradients switched off"),
        ("RingOfEight", "many", "differs from one process"),
        ("NoStep", "plain", "Pipeline(None): expected a function, which runs a step"),
        ("ZeroesText", "plain", "Pipeline(..., zero_grad='now'): expected a function"),
        ("SameMasks", "drops", "where 4 are due: micro-batches share them"),
        ("LastBit", "rounds", "has other bits on rank 0 (pp=0) than in one process"),
        ("LastBitRecomputed", "rounds, recomputed", "has other bits with recomputation than without"),
        ("NotTied", "tied", "is that of this stage's copy alone: the tied weight is not summed over its stages"),
        (
            "KeepsEverything",
            "plain",
            "rank 0 (pp=0) has 4 micro-batches in flight, where 1f1b with 4 micro-batches needs",
        ),
        ("builtin+F45", "plain", "is divided by the number of micro-batches, 4, at every stage"),
        ("builtin+F46", "sharded", "are copies of one weight on rank 0 (dp=0, pp=0) and rank 2 (dp=0, pp=1)"),
        ("builtin+F48b", "drops, recomputed", "recomputation draws others"),
        ("builtin+F61", "plain", "is that of the last micro-batch alone: the others are not accumulated"),
        ("builtin+F64", "means", "is the mean of the micro-batches' means, and not the mean over all tokens"),
        ("builtin+F69", "raises", "were accepted on rank"),
    ],
)
def test_a_fault_is_told(benches: dict[str, Bench], candidate: str, case: str, words: str) -> None:
    verdict = verdict_of(benches, candidate, case)
    assert words in said(verdict), said(verdict)


def test_a_mistake_of_tying_is_no_cause_where_other_parameters_are_wrong() -> None:
    copy = Finding(
        "mismatch", "x", tensor="tied0[0].grad", cause="rank 0's tied0[0].grad is that of the copy on stage 1 alone"
    )
    other = Finding("mismatch", "y", tensor="tied1[0].grad")
    loss, bias = Finding("mismatch", "z", tensor="loss[0]"), Finding("mismatch", "b", tensor="bias0[0].grad")
    copies = ("tied0", "tied1")
    assert without_tying((copy, other, loss), copies) == (copy, other, loss)
    told, *rest = without_tying((copy, bias), copies)
    assert told.cause is None
    assert told.details == f"{POSSIBLE}: {copy.cause}"
    assert rest == [bias]


def test_the_engine_of_the_documentation_holds(benches: dict[str, Bench]) -> None:
    for name in ("gpipe", "two axes", "means"):
        case = dataclasses.replace(CASES[name], schedule="gpipe")
        benches.setdefault("simple", Bench(f"{HERE}:Simple").__enter__())
        verdict = benches["simple"].once(PIPELINE, case).verdict
        assert verdict.holds, said(verdict)
