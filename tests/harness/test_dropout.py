"""What is said of a layer with dropout: masks, replicas, recomputation. Two-sided."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.candidate import Candidate
from harness.local import WrongResult
from harness.observation import LocalTensor, Observation
from harness.properties.base import Description
from harness.properties.dropout import ENOUGH, FALSE_ALARMS, MASKS, chance_of, read_masks
from harness.properties.transformer import TRANSFORMER, judge, runs
from reference.layout import Layout, Whole, with_each
from reference.mesh import Mesh
from reference.transformer import TransformerCase, shapes, tensors

CASE = TransformerCase(Mesh.of(tp=2), hidden=4, heads=2, kv_heads=2, ffn=4, leading=((2, 1),), dropout=0.5, seed=3)
BOTH = Description("some", "some", supports=frozenset({"transformer_full_recompute"}))

Values = NDArray[np.float64]


def mask(seed: int, p: float = 0.5, scale: float | None = None, size: int = 1024) -> Values:
    kept = np.random.default_rng(seed).random(size) >= p
    return np.where(kept, 1 / (1 - p) if scale is None else scale, 0.0)


MASKS_OF_RANKS = [{"replicated": mask(0), "sharded": mask(1)}, {"replicated": mask(0), "sharded": mask(2)}]


def observed(
    case: TransformerCase = CASE,
    masks: list[Mapping[str, Values]] | None = None,
    changed: Mapping[tuple[int, str], LocalTensor | None] | None = None,
) -> list[Observation]:
    """Ranks that each hold all of every result, which are the same numbers."""
    whole: Layout = with_each(Whole(), case.replica_axes)
    names = {f"{name}.grad": (case.replicas, *shape) for name, shape in shapes(case).items()}
    names |= {
        f"{name}[0]{kind}": tensors(case)["input[0]"].shape for name, kind in (("output", ""), ("input", ".grad"))
    }
    found = []
    for rank in range(case.mesh.size):
        held: dict[str, LocalTensor | None] = {
            name: LocalTensor(np.full(shape[1:], 0.5), "float32") for name, shape in names.items()
        }
        held |= {name: value for (r, name), value in (changed or {}).items() if r == rank}
        shown = {region: LocalTensor(v, "float32") for region, v in (masks or MASKS_OF_RANKS)[rank].items()}
        found.append(Observation(held, dict.fromkeys(names, whole), facts={MASKS: shown}))
    return found


def messages(case: TransformerCase, *worlds: list[Observation], description: Description = BOTH) -> list[str]:
    return [f"{f.kind}: {f.message}" for f in judge(case, description, {}, worlds).findings]


def test_what_is_right_holds() -> None:
    assert messages(CASE, observed(), observed()) == []
    assert messages(CASE, observed(masks=[{}, {}])) == [], "a candidate that shows no masks"
    assert TRANSFORMER.expected(CASE) == {}


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (
            [{"sharded": mask(1)}, {"sharded": mask(1)}],
            "mismatch: the dropout mask of sharded regions is the same on rank 0 (tp=0) and rank 1 (tp=1): as if the "
            "random stream of each rank were never entered",
        ),
        (
            [{"replicated": mask(1)}, {"replicated": mask(2)}],
            "disagree: the dropout mask of replicated regions differs between rank 0 (tp=0) and rank 1 (tp=1): "
            "replicas drift apart",
        ),
        (
            [{"sharded": mask(1)}, {"sharded": mask(2, 0.5, 1.0)}],
            "mismatch: the dropout mask of sharded regions keeps elements times 1 where 1 / (1 - 0.5) = 2 is due on "
            "rank 1 (tp=1)",
        ),
        (
            [{"sharded": mask(1, 0.1, 2.0)}, {"sharded": mask(2)}],
            "mismatch: the dropout mask of sharded regions drops 94 of 1024 elements where p is 0.5 on rank 0 (tp=0)",
        ),
        (
            [{"sharded": mask(1, 0.5, math.nan)}, {"sharded": mask(2)}],
            "mismatch: the dropout mask of sharded regions keeps elements times nan where 1 / (1 - 0.5) = 2 is due on "
            "rank 0 (tp=0)",
        ),
    ],
)
def test_a_wrong_mask_is_named(masks: list[Mapping[str, Values]], message: str) -> None:
    assert messages(CASE, observed(masks=masks)) == [message]


def test_masks_are_compared_along_the_layers_axis_only() -> None:
    case = dataclasses.replace(CASE, mesh=Mesh.of(tp=2, dp=2))
    masks = [{"replicated": mask(rank // 2), "sharded": mask(2 + rank % 2)} for rank in range(4)]
    assert messages(case, observed(case, masks)) == []


OTHER, WRONG_DTYPE = LocalTensor(np.full((2, 1, 4), 0.25), "float32"), LocalTensor(np.zeros((2, 1, 4)), "float64")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {(1, "output[0]"): OTHER},
            "disagree: output[0] is replicated on rank 0 (tp=0) and rank 1 (tp=1), but its bits differ",
        ),
        ({(1, "output[0]"): None}, "mismatch: output[0] is missing on rank 1 (tp=1)"),
        (
            {(0, "output[0]"): WRONG_DTYPE},
            "mismatch: output[0] has dtype float64; expected float32 on rank 0 (tp=0)",
        ),
        (
            {(r, "input[0].grad"): LocalTensor(np.full((2, 1, 4), np.nan), "float32") for r in range(2)},
            "mismatch: input[0].grad is not finite on rank 0 (tp=0), although all that is given is",
        ),
    ],
)
def test_what_needs_no_expected_value_is_judged(
    changed: Mapping[tuple[int, str], LocalTensor | None], message: str
) -> None:
    assert messages(CASE, observed(changed=changed)) == [message]


def test_recomputation_must_give_the_same_bits() -> None:
    again = observed(changed={(r, "input[0].grad"): OTHER for r in range(2)})
    assert messages(CASE, observed(), again) == [
        "mismatch: input[0].grad differs between recompute='none' and recompute='full' on rank 0 (tp=0): 8 of 8 "
        "elements"
    ]


def test_a_case_with_dropout_runs_twice_where_the_candidate_can_recompute() -> None:
    kinds = frozenset({"transformer_selective_recompute", "transformer_full_recompute"})
    for recompute, supports, other in (
        ("none", kinds, "selective"),
        ("selective", kinds, "none"),
        ("full", kinds, "none"),
        ("none", kinds - {"transformer_selective_recompute"}, "full"),
        ("none", frozenset(), None),
    ):
        case = dataclasses.replace(CASE, recompute=recompute)
        found = runs(case, dataclasses.replace(BOTH, supports=supports))
        assert [run.recompute for run in found] == [recompute, *([other] if other else [])]
        assert len(runs(dataclasses.replace(case, dropout=0.0), BOTH)) == 1


class Showing(Candidate):
    """Has masks to show."""

    masks: Any = None

    def dropout_masks(self, case: TransformerCase) -> Any:
        return self.masks


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (None, "dropout_masks returned None; expected a tensor for each of replicated, sharded"),
        ({"attention": torch.ones(200)}, "expected a tensor for each of replicated, sharded"),
        ({"sharded": torch.ones(ENOUGH - 1)}, f"the sharded dropout mask is too small to be judged: expected {ENOUGH}"),
        ({"sharded": [1.0]}, "the sharded dropout mask is [1.0]; expected a tensor"),
    ],
)
def test_what_is_no_mask_is_refused(masks: Any, message: str) -> None:
    candidate = Showing()
    candidate.masks = masks
    with pytest.raises(WrongResult) as caught:
        read_masks(candidate, CASE)
    assert message in str(caught.value)


def test_masks_are_read_where_they_are_shown() -> None:
    assert read_masks(Candidate(), CASE) == {}
    candidate = Showing()
    candidate.masks = {"sharded": torch.full((8, 16), 2.0)}
    assert read_masks(candidate, CASE)["sharded"].dtype == "float32"


@given(st.integers(1, 200), st.sampled_from([0.1, 0.5]), st.data())
def test_the_chance_of_a_share_is_that_of_a_binomial_number(size: int, p: float, data: st.DataObject) -> None:
    zeros = data.draw(st.integers(0, size))
    exact = [math.comb(size, k) * p**k * (1 - p) ** (size - k) for k in range(size + 1)]
    want = min(1.0, 2 * min(sum(exact[: zeros + 1]), sum(exact[zeros:])))
    assert chance_of(zeros, size, p) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_share_that_is_refused_is_far_out_and_close_enough(p: float) -> None:
    """Of 1,024 elements: six standard deviations or a little more; a mask of the other p is refused."""
    chances = [chance_of(zeros, 1024, p) for zeros in range(1025)]
    held = [zeros for zeros, chance in enumerate(chances) if chance >= FALSE_ALARMS]
    deviation = math.sqrt(1024 * p * (1 - p))
    assert 5.5 < (held[-1] - 1024 * p) / deviation < 7
    assert 5 < (1024 * p - held[0]) / deviation < 7
    assert chances[int(1024 * (0.6 - p))] < FALSE_ALARMS
