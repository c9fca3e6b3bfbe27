"""What the known mistakes of data parallelism give: each is named where ranks hold it, and right ranks hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from harness.observation import LocalTensor, Observation
from harness.oracle.statistics import Expected
from harness.properties.base import Description
from harness.properties.data_parallel import DATA_PARALLEL, judge
from harness.properties.data_parallel_suspects import suspects
from harness.properties.modules import one_thread
from harness.verdict import Verdict
from reference.data_parallel import DataParallelCase, DataParallelRecipes, Layer, tensors
from reference.data_parallel_gradients import expected
from reference.layout import Whole, window, with_each
from reference.mesh import Mesh
from reference.recipe import Recipe

NORMAL = DataParallelRecipes(*[Recipe("normal")] * 3)
PLAIN = DataParallelCase(
    Mesh.of(dp=3, tp=2),
    (Layer(4), Layer(3)),
    features=4,
    micro_batches=3,
    samples=2,
    length=3,
    counts=(1, 3, 2, 0, 2),
    loss="token_mean",
    recipes=NORMAL,
)
SAMPLES = dataclasses.replace(PLAIN, loss="sample_mean", reduction="sum")
EVERY = dataclasses.replace(PLAIN, loss="sum", sync="every", empty=(1,))


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_thread():
        yield


@cache
def expectations(case: DataParallelCase) -> dict[str, Any]:
    return dict(DATA_PARALLEL.expected(case))


def judged(case: DataParallelCase, name: str, wrong: Any) -> Verdict:
    """The verdict on ranks whose results are right, but for one that is what a suspect says."""
    want, ranks = expectations(case), []
    layout = with_each(Whole(), case.replica_axes)
    for rank in range(case.mesh.size):
        held: dict[str, LocalTensor | None] = {}
        for result, value in want.items():
            whole = value.want if isinstance(value, Expected) else value.numpy()
            if result == name:
                whole = wrong[rank] if isinstance(wrong, tuple) else wrong
            part = window(whole.shape, layout, case.mesh, rank).take(whole)
            rounded = torch.from_numpy(np.array(part)).to(torch.float32).to(torch.float64).numpy()
            held[result] = LocalTensor(rounded, "float32")
        ranks.append(Observation(held))
    return judge(case, Description("some", "some"), dict(want), [ranks])


@pytest.mark.parametrize("case", [PLAIN, SAMPLES, EVERY], ids=["tokens", "samples", "every"])
def test_every_suspect_is_named_where_it_is_what_the_ranks_hold(case: DataParallelCase) -> None:
    given, named = tensors(case), set()
    for name in ("weight0[0].grad", "weight1[0].grad"):
        for suspect in suspects(case, given, name):
            verdict = judged(case, name, suspect.values)
            assert not verdict.holds, (name, suspect.cause)
            assert suspect.cause in str(verdict.findings[0].cause), (suspect.cause, verdict.findings[0])
            named.add(suspect.cause)
    assert len(named) == {"token_mean": 14, "sample_mean": 13, "sum": 11}[case.loss], named


@pytest.mark.parametrize("case", [PLAIN, SAMPLES], ids=["tokens", "samples"])
def test_a_loss_that_is_another_mean_is_a_possible_cause(case: DataParallelCase) -> None:
    """One value for each replica is too little to be sure."""
    for suspect in suspects(case, tensors(case), "loss[0]"):
        finding = judged(case, "loss[0]", suspect.values).findings[0]
        assert suspect.cause in f"{finding.cause} {finding.details}", (suspect.cause, finding)


@pytest.mark.parametrize("case", [PLAIN, SAMPLES, EVERY], ids=["tokens", "samples", "every"])
def test_right_ranks_hold_and_suspects_differ_from_what_is_right(case: DataParallelCase) -> None:
    assert judged(case, "", None).holds
    right = expected(case, tensors(case))["weight0[0].grad"]
    assert right is not None
    for suspect in suspects(case, tensors(case), "weight0[0].grad"):
        values = suspect.values if isinstance(suspect.values, tuple) else (suspect.values,)
        assert any(not np.allclose(value, right.numpy()) for value in values), suspect.cause


def test_what_ranks_have_adds_up_to_what_is_right() -> None:
    case = dataclasses.replace(PLAIN, mesh=Mesh.of(dp=3), reduction="sum")
    right = expected(case, tensors(case))["weight0[0].grad"]
    (own,) = [s for s in suspects(case, tensors(case), "weight0[0].grad") if s.cause.startswith("is the rank's own:")]
    np.testing.assert_allclose(np.sum(own.values, axis=0), right, atol=1e-12)


def test_one_rank_has_no_reduction_to_forget() -> None:
    case = dataclasses.replace(PLAIN, mesh=Mesh.of(dp=1), loss="sum", micro_batches=1)
    assert suspects(case, tensors(case), "weight0[0].grad") == []
    assert suspects(case, tensors(case), "loss[0]") == []
