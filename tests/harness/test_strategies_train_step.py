"""Which training steps are drawn, and to what they shrink."""

from __future__ import annotations

from dataclasses import replace

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase

import strategies.gpt
import strategies.train_step
import strategies.train_step_simpler
from reference.gpt import GptCase
from reference.loss_scale import Scaling
from reference.mesh import Mesh
from reference.mixed_precision_parts import Overflow
from reference.train_step import TrainStepCase
from reference.train_step_expected import plan
from strategies.scope import Scope
from strategies.train_step import FEATURES, decided, needs, within
from strategies.train_step_simpler import simpler

ALL = Scope(max_world=8, features=frozenset({*FEATURES, *strategies.gpt.FEATURES}))
PLAIN = frozenset(f"gpt_{name}" for name in ("gpipe", "untied", "no_positions", "layer_norm", "gelu"))
FEW = Scope(max_world=4, dtypes=("fp32", "fp64"), axes=("pp",), features=PLAIN)


def sample(scope: Scope, count: int) -> list[TrainStepCase]:
    found: list[TrainStepCase] = []

    @hypothesis.settings(
        max_examples=count, phases=[Phase.generate], database=None, deadline=None,
        suppress_health_check=list(HealthCheck), derandomize=False,
    )  # fmt: skip
    @hypothesis.seed(1)
    @hypothesis.given(strategies.train_step.cases(scope))
    def draw(case: TrainStepCase) -> None:
        found.append(case)

    draw()
    return found


@pytest.fixture(scope="module")
def drawn() -> list[TrainStepCase]:
    return [*sample(replace(ALL, dtypes=("fp32", "bf16")), 120), *sample(replace(ALL, dtypes=("fp16",)), 80)]


def test_every_feature_is_drawn(drawn: list[TrainStepCase]) -> None:
    for feature in FEATURES:
        assert any(needs(case)[feature] for case in drawn), feature
    assert {case.resume for case in drawn} == {"same", "apart", "together"}
    assert {case.steps for case in drawn} == {1, 2, 3, 4}
    assert {case.dtype for case in drawn} == {"fp32", "bf16", "fp16"}
    for axis in ("tp", "pp", "dp"):
        assert any(case.overflows and case.overflows[0].axes == (axis,) for case in drawn)


def test_what_is_drawn_is_within_the_scope(drawn: list[TrainStepCase]) -> None:
    assert all(within(case, ALL) for case in drawn[::3])
    for case in sample(FEW, 20):
        assert within(case, FEW)
        assert case.mesh.names in ((), ("pp",))
        assert case.dtype == "fp32"


def test_steps_overflow_of_themselves(drawn: list[TrainStepCase]) -> None:
    """Beside those into which an overflow is put."""
    plain = [case for case in drawn if not case.overflows]
    assert any(one.skipped for case in plain if case.dtype == "fp16" for one in plan(case))
    assert not any(one.skipped for case in plain if case.dtype != "fp16" for one in plan(case))


def test_what_rounding_decides_is_not_drawn() -> None:
    case = TrainStepCase(GptCase(Mesh(()), 5, 4, 1, 1, 1, length=2, counts=(2,), dtype="fp16"))
    near = [replace(case, scaling=Scaling("constant", 2.0**k)) for k in range(8, 24)]
    assert {decided(one) for one in near} == {True, False}
    assert not any(within(one, ALL) for one in near if not decided(one))


BIG = TrainStepCase(
    GptCase(
        Mesh.of(tp=2, pp=2, dp=2), 9, 16, 4, 2, 6, depths=(2, 1), sizes=(1, 2), length=4, counts=(4, 1, 2), tied=True,
        positions="learned", bias=True, sequence_parallel=True, schedule="1f1b", dtype="bf16",
    ),
    steps=4, optimizer="adamw", lr=2.0**-5, clip=1.0, sharded=True, scaling=Scaling("constant", 2.0**8), load=2,
    resume="apart", overflows=(Overflow(1, "nan", ("tp", "pp", "dp"), 5),), warmup=2,
)  # fmt: skip


@pytest.mark.parametrize("axis", ["tp", "pp", "dp"])
def test_it_shrinks_to_two_ranks_at_once_and_then_to_little(axis: str) -> None:
    def fails(case: TrainStepCase) -> bool:
        return case.mesh.axis_size(axis) > 1 and case.clip > 0

    case, tries = BIG, 0
    first = 0
    while True:
        for proposal in simpler(case, ALL):
            assert strategies.train_step_simpler._measure(proposal) < strategies.train_step_simpler._measure(case)
            tries += 1
            if fails(proposal):
                case = proposal
                break
        else:
            break
        first = first or (tries if case.mesh.size == 2 else 0)
    assert first <= 8
    assert case.mesh == Mesh.of(**{axis: 2})
    assert (case.steps, case.optimizer, case.overflows, case.load, case.dtype) == (1, "sgd", (), 0, "fp32")
    assert case.model.layers <= 2


@pytest.mark.parametrize("axis", ["tp", "pp", "dp"])
def test_an_overflow_stays_on_one_rank(axis: str) -> None:
    def fails(case: TrainStepCase) -> bool:
        return any(axis in one.axes and case.mesh.axis_size(axis) > 1 for one in case.overflows)

    case = BIG
    while found := next((one for one in simpler(case, ALL) if fails(one)), None):
        case = found
    assert case.mesh == Mesh.of(**{axis: 2})
    assert (case.steps, case.overflows) == (1, (Overflow(axes=(axis,)),))
