"""Subject train_step: a state that other processes load, which have nothing but it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from harness import check
from harness.bench import Bench
from harness.properties.train_step import TRAIN_STEP
from reference.gpt import GptCase
from reference.mesh import Mesh
from reference.mixed_precision_parts import Overflow
from reference.train_step import TrainStepCase

MODEL = GptCase(Mesh.of(dp=2), 5, 8, 1, 1, 2, sizes=(1, 1), length=3, counts=(3, 1, 2), tied=True)
PLAIN = TrainStepCase(MODEL, steps=3, warmup=4, load=2, relaunch=True)


@pytest.fixture(scope="module")
def shipped() -> Iterator[Bench]:
    with Bench("builtin") as bench:
        yield bench


@pytest.mark.parametrize(
    "case",
    [
        replace(PLAIN, model=replace(MODEL, dropout=0.5), momentum=0.75),
        replace(PLAIN, model=replace(MODEL, dtype="bf16"), optimizer="adamw", lr=2.0**-5, sharded=True, clip=1.0),
        replace(PLAIN, resume="apart", sharded=True, momentum=0.75),
        replace(PLAIN, resume="together", overflows=(Overflow(1), Overflow(2, "nan", ("dp",), 1))),
    ],
    ids=["drops", "cut over dp", "apart", "together"],
)
def test_new_processes_go_on(shipped: Bench, case: TrainStepCase) -> None:
    trial = shipped.once(TRAIN_STEP, case)
    assert not trial.verdict.findings, trial.verdict.findings[0]
    assert trial.verdict.facts, "it was judged"


def test_what_the_process_has_kept_for_itself_is_missed() -> None:
    check("train_step", "builtin+F96", replace(PLAIN, relaunch=False))
    with pytest.raises(AssertionError, match="the count of steps that were not skipped is 1 on every rank in step 2"):
        check("train_step", "builtin+F96", PLAIN)


def test_they_are_new_processes_that_load(shipped: Bench) -> None:
    """And the run without an interruption is made by as many as there are then."""
    pool = shipped.ranks(MODEL.mesh)
    before = pool.pids
    assert not shipped.once(TRAIN_STEP, PLAIN).verdict.findings
    middle = pool.pids
    assert not set(before) & set(middle)
    assert not shipped.once(TRAIN_STEP, replace(PLAIN, relaunch=False)).verdict.findings
    assert pool.pids == middle


def test_there_is_nothing_to_load_without_a_load() -> None:
    with pytest.raises(ValueError, match="relaunch without a load"):
        TrainStepCase(MODEL, relaunch=True)
