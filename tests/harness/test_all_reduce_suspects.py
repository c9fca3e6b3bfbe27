"""What a wrong reduction is said to be, and that nothing of it is said of a right one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from harness.observation import REFUSED, LocalTensor, Observation
from harness.properties.all_reduce import ALL_REDUCE, judge
from harness.properties.base import Description
from harness.verdict import Verdict
from reference.all_reduce import AllReduceCase, AllReduceRecipes, layouts, tensors
from reference.layout import window
from reference.mesh import Mesh
from reference.recipe import Recipe

CASE = AllReduceCase(Mesh.of(tp=3, dp=2), shapes=((14,),))
DESCRIPTION = Description("mine.py:Mine", "Mine")
Values = np.ndarray


def verdict(case: AllReduceCase, compute: Callable[[list[Values], int], Values]) -> Verdict:
    """Of ranks that hold what ``compute`` makes of the values of a rank's group and its place in it."""
    want = ALL_REDUCE.expected(case)
    (given,) = tensors(case).values()
    own = [window(given.shape, layouts(case)["input"], case.mesh, r).take(given.numpy()) for r in range(case.mesh.size)]
    observed = []
    for rank in range(case.mesh.size):
        group = [int(r) for r in case.mesh.group_of(rank, case.axis)]
        values = compute([own[r] for r in group], group.index(rank))
        observed.append(Observation({"output[0]": LocalTensor(values, "float32")}))
    return judge(case, DESCRIPTION, want, [observed])


def tail(parts: list[Values], at: int) -> Values:
    total = np.sum(parts, axis=0)
    reached = total.size // len(parts) * len(parts)
    return np.concatenate([total[:reached], parts[at][reached:]])


@pytest.mark.parametrize(
    ("reduction", "compute", "says"),
    [
        ("sum", lambda parts, at: parts[at], "equals this rank's own input: it is not reduced"),
        ("sum", tail, "own input past 3 times length // 3 elements: the tail is not reduced"),
        ("sum", lambda parts, at: np.sum(parts, axis=0) / 3, "is the mean over tp, where the sum is due"),
        ("sum", lambda parts, at: np.max(parts, axis=0), "is the maximum over tp, where the sum is due"),
        ("sum", lambda parts, at: np.sum(parts, axis=0) * 3, "3 times too large: summed over tp twice"),
        ("avg", lambda parts, at: np.sum(parts, axis=0), "is the sum over tp, where the mean is due"),
        ("avg", lambda parts, at: np.sum(parts, axis=0) / 9, "is divided by 3 twice"),
        ("max", lambda parts, at: np.min(parts, axis=0), "is the minimum over tp, where the maximum is due"),
        ("min", lambda parts, at: np.sum(parts, axis=0), "is the sum over tp, where the minimum is due"),
    ],
)
def test_known_mistakes_are_named(reduction: str, compute: Callable[..., Values], says: str) -> None:
    case = AllReduceCase(CASE.mesh, reduction=reduction, shapes=CASE.shapes)  # type: ignore[arg-type]
    (first, *_) = verdict(case, compute).findings
    assert says in (first.cause or ""), first


def test_a_sum_over_all_ranks_is_named() -> None:
    everyone = tensors(CASE)["input[0]"].sum(0).numpy()
    (first, *_) = verdict(CASE, lambda parts, at: everyone).findings
    assert "is reduced over all ranks, and not over tp alone" in (first.cause or ""), first


@pytest.mark.parametrize("reduction", ["sum", "avg", "max", "min"])
def test_of_a_right_reduction_nothing_is_said(reduction: str) -> None:
    right = {"sum": np.sum, "avg": np.mean, "max": np.max, "min": np.min}[reduction]
    case = AllReduceCase(CASE.mesh, reduction=reduction, shapes=CASE.shapes)  # type: ignore[arg-type]
    assert verdict(case, lambda parts, at: right(parts, axis=0)).holds


def test_one_rank_with_other_bits_disagrees() -> None:
    """-0.0 is 0.0, but not the same bits."""
    zeros = AllReduceRecipes(Recipe("zeros"))
    case = AllReduceCase(Mesh.of(tp=2), reduction="max", shapes=((2,),), recipes=zeros)
    same = verdict(case, lambda parts, at: np.zeros(2))
    other = verdict(case, lambda parts, at: np.zeros(2) * (-1 if at else 1))
    assert same.holds
    assert [finding.kind for finding in other.findings] == ["disagree"]


def test_what_must_be_refused_and_is_accepted_on_some_rank_is_said() -> None:
    case = AllReduceCase(Mesh.of(tp=2), algorithm="ring", invalid="length")
    refused, accepted = Observation(facts={REFUSED: "ValueError: no"}), Observation(facts={REFUSED: None})
    assert judge(case, DESCRIPTION, {}, [[refused] * 2]).holds
    (one,) = judge(case, DESCRIPTION, {}, [[refused, accepted]]).findings
    assert one.kind == "disagree"
    (both,) = judge(case, DESCRIPTION, {}, [[accepted] * 2]).findings
    assert both.message.startswith("tensors that are longer on one rank were accepted")
