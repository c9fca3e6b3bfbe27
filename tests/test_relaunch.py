"""States that new processes load, which have nothing but them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from module_state import CountsInTheModule, CountsUntold, SavingCounts

from harness import check, verify
from harness.bench import Bench
from harness.candidates.builtin import Builtin
from harness.properties.base import Property
from harness.properties.loss_scale import LOSS_SCALE
from harness.properties.mixed_precision import MIXED_PRECISION
from harness.properties.sharded_optimizer import SHARDED_OPTIMIZER
from harness.properties.train_step import TRAIN_STEP
from reference.gpt import GptCase
from reference.loss_scale import Event, LossScaleCase, Scaling
from reference.mesh import Mesh
from reference.mixed_precision import MixedPrecisionCase
from reference.mixed_precision_parts import MixedParameter, Overflow
from reference.sharded_optimizer import Parameter, ShardedOptimizerCase
from reference.train_step import TrainStepCase

MODEL = GptCase(Mesh.of(dp=2), 5, 8, 1, 1, 2, sizes=(1, 1), length=3, counts=(3, 1, 2), tied=True)
PLAIN = TrainStepCase(MODEL, steps=3, warmup=4, load=2, relaunch=True)


OPTIMIZER = MixedPrecisionCase(
    Mesh.of(dp=2), (MixedParameter(3), MixedParameter(2, "some")), dtype="bf16", steps=3, warmup=4, load=2,
    relaunch=True,
)  # fmt: skip
SHARDED = ShardedOptimizerCase(Mesh.of(dp=2), (Parameter((3,)),), steps=2, optimizer="adamw", load=1, relaunch=True)


#: The state is loaded once more by those who go on.
SCALER = LossScaleCase(
    Mesh.of(dp=2), (Event(), Event("save"), Event("relaunch"), Event(), Event("overflow"), Event("load"), Event()),
    agree=True,
)  # fmt: skip


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
    _holds(shipped, TRAIN_STEP, case)


@pytest.mark.parametrize(
    "case",
    [
        replace(OPTIMIZER, optimizer="adamw", reload=2),
        replace(OPTIMIZER, sharded=True, momentum=0.9, clip=0.5, overflows=(Overflow(1), Overflow(2))),
    ],
)
def test_new_optimizers_go_on(shipped: Bench, case: MixedPrecisionCase) -> None:
    _holds(shipped, MIXED_PRECISION, case)


@pytest.mark.parametrize(
    "case",
    [SHARDED, replace(SHARDED, mesh=Mesh.of(dp=2, tp=2), steps=3, load_axis="tp", parameters=(Parameter((5,)),))],
)
def test_new_sharded_optimizers_go_on(shipped: Bench, case: ShardedOptimizerCase) -> None:
    _holds(shipped, SHARDED_OPTIMIZER, case)


@pytest.mark.parametrize(
    "case",
    [
        SCALER,
        replace(SCALER, scaling=Scaling("constant", 8.0), events=(Event("relaunch"), Event("overflow"))),
        replace(SCALER, scaling=Scaling(hysteresis=2), events=(Event("overflow"), Event("relaunch"))),
    ],
    ids=["after steps", "a constant scale", "at the end"],
)
def test_new_scalers_go_on(shipped: Bench, case: LossScaleCase) -> None:
    trial = shipped.once(LOSS_SCALE, case)
    assert not trial.verdict.findings, trial.verdict.findings[0]
    assert trial.verdict.rejected is None


def _holds(bench: Bench, subject: Property, case: object) -> None:
    trial = bench.once(subject, case)
    assert not trial.verdict.findings, trial.verdict.findings[0]
    assert trial.verdict.facts, "it was judged"


def test_what_the_process_has_kept_for_itself_is_missed() -> None:
    check("train_step", "builtin+F96", replace(PLAIN, relaunch=False))
    with pytest.raises(AssertionError, match="the count of steps that were not skipped is 1 on every rank in step 2"):
        check("train_step", "builtin+F96", PLAIN)
    check("mixed_precision", "builtin+F96", replace(OPTIMIZER, relaunch=False))
    with pytest.raises(AssertionError, match="the count of steps that were not skipped is 1 on every rank in step 2"):
        check("mixed_precision", "builtin+F96", OPTIMIZER)
    check("sharded_optimizer", CountsInTheModule, replace(SHARDED, relaunch=False))
    with pytest.raises(AssertionError, match="has other bits"):
        check("sharded_optimizer", CountsInTheModule, SHARDED)
    fresh = replace(SCALER, events=(*SCALER.events[:2], Event("fresh"), *SCALER.events[3:]))
    check("loss_scale", CountsInTheModule, fresh)
    said = r"good steps in a row is 0 on every rank after event 2 \(load in new processes\); expected 1"
    with pytest.raises(AssertionError, match=said):
        check("loss_scale", CountsInTheModule, SCALER)


@pytest.mark.parametrize("candidate", [CountsInTheModule, CountsUntold])
def test_cases_are_drawn_that_miss_a_scaler_s_count(candidate: type[Builtin]) -> None:
    """Also where the candidate does not tell the count, so that it shows in the scale alone."""
    spec = f"{Path(__file__).parent / 'module_state.py'}:{candidate.__name__}"
    done = verify(spec, subjects=["loss_scale"], examples=100, seed=1, max_world=2, save=None)
    (row,) = done.rows
    assert row.result == "fault", (row.examples, row.stopped)
    (case,) = {failure.reproducer.case for failure in row.failures if failure.verdict.kind == "mismatch"}
    assert "relaunch" in [event.what for event in case.events]


@pytest.mark.parametrize("relaunch", [False, True])
def test_what_saving_changes_shows_in_the_next_step(relaunch: bool) -> None:
    """What is saved is right, and whoever loads it: it is who saved that goes on otherwise."""
    anew = " in new processes" if relaunch else ""
    said = f"went on, has other bits than who loaded it{anew}, on rank 0"
    with pytest.raises(AssertionError, match=f"saving changed something: after step 2 .*{said}.* in parameter0, "):
        check("mixed_precision", SavingCounts, replace(OPTIMIZER, relaunch=relaunch))
    with pytest.raises(AssertionError, match=said):
        check("sharded_optimizer", SavingCounts, replace(SHARDED, relaunch=relaunch))


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
    for case in (OPTIMIZER, SHARDED):
        with pytest.raises(ValueError, match="relaunch without a load"):
            replace(case, load=0)  # type: ignore[type-var]


def test_processes_are_replaced_once() -> None:
    with pytest.raises(ValueError, match="several events relaunch: expected one"):
        replace(SCALER, events=(Event("relaunch"),) * 2)
