"""PyTorch's tensor parallelism and FSDP2 on one GPT, on real ranks against one process; and what a trainer that puts
them together wrongly gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from faulty_fsdp_tp import SYNCS_EVERY, seed_of
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import cases, check
from harness.bench import Bench
from harness.properties import property_of
from harness.verdict import Finding
from reference.gpt import GptCase
from reference.ids import Ids
from reference.loss_scale import Scaling
from reference.mesh import Mesh
from reference.train_step import TrainStepCase

CANDIDATE = "harness.candidates.torch_fsdp_tp:TorchFsdpTp"
#: A module, and not a file, so that ranks are forked when all of torch that it needs is imported.
FAULTY = "faulty_fsdp_tp:FaultyFsdpTp"

TWO = GptCase(Mesh.of(dp=2), 5, 4, 1, 1, 2, depths=(0,), sizes=(1, 1), length=3, counts=(3, 1, 2))
FOUR = replace(TWO, mesh=Mesh.of(tp=2, dp=2), vocabulary=6, heads=2, kv_heads=2, hidden=8, length=4, depths=(1,))
TOKENS: dict[str, Any] = {"sequence_parallel": True, "positions": "learned"}
ADAM: dict[str, Any] = {"optimizer": "adamw", "lr": 2.0**-5}
MOVES = Scaling(initial=2.0**10, growth_interval=2)

#: Right ones; rows of cut weights are dealt unevenly over dp.
RIGHT = {
    "tied": replace(FOUR, tied=True, bias=True, recompute="selective", norm="rms", activation="swiglu"),
    "tokens cut": replace(FOUR, **TOKENS, qk_norm=True, recompute="full"),
    "fp64": replace(FOUR, mesh=Mesh((("dp", 2), ("tp", 2))), dtype="fp64", positions="rotary", depths=(2,)),
    "adamw": TrainStepCase(
        replace(FOUR, tied=True, **TOKENS), steps=3, **ADAM, clip=0.25, clip_eps=1e-6, scaling=MOVES, load=2, warmup=4
    ),
    "sgd": TrainStepCase(replace(FOUR, mesh=Mesh((("dp", 2), ("tp", 2)))), steps=2, load=1, weight_decay=0.125),
    "momentum": TrainStepCase(TWO, steps=2, momentum=0.75, clip=0.25, clip_eps=1e-6, scaling=Scaling("constant", 4.0)),
}  # fmt: skip

#: By mistake, a case that shows it, and what is said of it.
SHOWS: dict[str, tuple[Any, str]] = {
    "averaged": (TrainStepCase(TWO), "gradients were averaged over dp"),
    "own tokens": (TWO, "differs from one process"),
    "first micro-batch": (TWO, "is that of micro-batch 0 alone"),
    "own norm": (TrainStepCase(TWO, clip=0.25, clip_eps=1e-6), "norm[0] differs from one process"),
    "same positions": (replace(FOUR, mesh=Mesh.of(tp=2), **TOKENS), "differs from one process"),
}


def of_seed(case: Any, seed: int) -> Any:
    if isinstance(case, TrainStepCase):
        return replace(case, model=of_seed(case.model, seed))
    return replace(case, ids=Ids(seed=seed))


def found_in(bench: Bench, case: Any) -> tuple[Finding, ...]:
    verdict = bench.check(property_of("train_step" if isinstance(case, TrainStepCase) else "gpt"), case).verdict
    assert verdict.rejected is None
    return verdict.findings


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench(FAULTY) as made:
        yield made


@pytest.mark.parametrize("name", RIGHT)
def test_it_is_one_process(bench: Bench, name: str) -> None:
    assert found_in(bench, RIGHT[name]) == ()


@pytest.mark.parametrize("name", SHOWS)
def test_a_mistake_shows(bench: Bench, name: str) -> None:
    case, words = SHOWS[name]
    assert found_in(bench, case) == ()
    findings = found_in(bench, of_seed(case, seed_of(name)))
    assert any(words in f"{one.message} {one.cause}" for one in findings), findings
    assert {one.kind for one in findings} <= {"mismatch", "disagree"}, findings


def test_gradients_that_are_reduced_in_every_micro_batch_are_right(bench: Bench) -> None:
    assert found_in(bench, of_seed(TWO, SYNCS_EVERY)) == ()


def test_key_value_heads_that_ranks_share_are_refused(bench: Bench) -> None:
    verdict = bench.check(property_of("gpt"), replace(FOUR, kv_heads=1)).verdict
    assert "key/value heads that several ranks hold" in str(verdict.rejected)


@settings(max_examples=1)
@given(data=st.data())
def test_drawn_training_is_that_of_one_process(data: st.DataObject) -> None:
    check("train_step", CANDIDATE, data.draw(cases("train_step", CANDIDATE, max_world=4)))
