"""Factors and offsets: recognised where they are planted, not where one element more is wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from test_patterns_evidence import EXACT_AND_NOT, TP2, TP4, Planted, spoiled

from harness.oracle.patterns.evidence import Evidence
from harness.oracle.patterns.factors import any_factor, named_factor, slight_factor
from harness.oracle.patterns.formats import format_named, rounded
from harness.oracle.patterns.offsets import off_by_a_constant, off_by_another_tensor
from reference.layout import Each, Split, Whole
from reference.mesh import Mesh


@EXACT_AND_NOT
@pytest.mark.parametrize(
    ("factor", "mesh", "micro_batches", "said"),
    [
        (4, TP4, 1, "every element of x is 4 times too large: the size of tp, as when summed where one copy is due"),
        (3, TP4, 3, "every element of x is 3 times too large: the number of micro-batches, as when summed where one"),
        (0.25, TP4, 1, "every element of x is 1/4 of what it should be: 1 over the size of tp, as when averaged where"),
        (2, Mesh.of(tp=2, dp=2), 2, "2 times too large: the size of tp, the size of dp or the number of micro-batches"),
        (6, Mesh.of(tp=2, dp=3), 1, "6 times too large: the size of tp x dp, as when"),
        (-1, TP4, 1, "every element of x has the wrong sign"),
    ],
)
def test_a_factor_that_has_a_name(exact: bool, factor: float, mesh: Mesh, micro_batches: int, said: str) -> None:
    planted = Planted((8, 5), Split(0, "tp"), mesh, exact)
    planted.got = [factor * part for part in planted.got]
    found = named_factor(planted.evidence(micro_batches=micro_batches))
    assert found is not None
    assert said in found
    assert spoiled(planted, named_factor, micro_batches=micro_batches) is None


@EXACT_AND_NOT
def test_a_factor_on_one_rank(exact: bool) -> None:
    planted = Planted((8, 5), Split(0, "tp"), TP4, exact)
    planted.got[2] = 4 * planted.got[2]
    assert "4 times too large on rank 2: the size of tp" in (named_factor(planted.evidence()) or "")
    planted.got[1] = 3 * planted.got[1]
    assert named_factor(planted.evidence()) is None, "another factor on another rank"


def test_a_factor_that_low_precision_rounds() -> None:
    planted = Planted((8, 5), Whole(), Mesh.of(tp=3))
    planted.want = np.round(planted.want / 2)
    planted.got = [rounded(3 * planted.want, format_named("bfloat16"))] * 3
    assert "3 times too large" in (named_factor(planted.evidence(dtype="bfloat16")) or "")
    assert named_factor(planted.evidence(dtype="float32")) is None, "float32 would hold three times exactly"


def test_few_values_have_a_factor_by_chance() -> None:
    mesh = Mesh.of(tp=2)
    for want, sure in ((np.array([3.0]), False), (np.array([3.0, 500.0]), True), (np.full((9, 9), 3.0), False)):
        found = Evidence("x", want, Whole(), mesh, (2 * want, 2 * want), dtype="float32")
        assert (named_factor(found) is not None) is sure, want


@EXACT_AND_NOT
def test_a_factor_without_a_name(exact: bool) -> None:
    planted = Planted((8, 5), Split(0, "tp"), TP2, exact)
    planted.got = [1.5 * part for part in planted.got]
    assert named_factor(planted.evidence()) is None
    assert "every element of x is 1.5" in (any_factor(planted.evidence()) or "")
    assert spoiled(planted, any_factor) is None
    planted.want = np.sign(planted.want)
    planted.got = planted.parts(1.5 * planted.want)
    assert any_factor(planted.evidence()) is None, "of one magnitude, it may be anything"


@pytest.mark.parametrize(("factor", "told"), [(1 + 4e-6, True), (1 - 4e-6, True), (1 + 2e-7, False), (1.0, False)])
def test_a_factor_below_the_tolerance_of_single_elements(factor: float, told: bool) -> None:
    planted = Planted((40, 25), Split(0, "tp"), TP2, exact=False)
    planted.want = planted.random.uniform(0.5, 1.0, planted.shape)
    planted.got = planted.parts(factor * planted.want)
    found = planted.evidence()
    assert found.wrong_ranks == ()
    said = slight_factor(found)
    assert (said is not None) is told
    if told:
        assert f"every rank's x is {factor:.6g} times what it should be" in (said or "")


def test_factors_are_not_seen_in_noise_nor_in_what_is_not_finite() -> None:
    for seed in range(20):
        planted = Planted((6, 5), Split(0, "tp"), TP2, exact=seed % 2 == 0, seed=seed)
        planted.got = planted.parts(planted.fresh(planted.shape))
        assert named_factor(planted.evidence()) is None
        assert any_factor(planted.evidence()) is None
        planted.got[1][:] = [math.nan, math.inf, -math.inf, 1e308, 0.0]
        with np.errstate(all="ignore"):  # as diagnose() does
            assert named_factor(planted.evidence()) is None
            assert any_factor(planted.evidence()) is None


@EXACT_AND_NOT
@pytest.mark.parametrize(
    ("multiple", "n", "said"),
    [
        (1, 2, "off by bias: added on both ranks of tp before a sum, or twice on each"),
        (3, 4, "off by 3 times bias: added on every rank of tp before a sum"),
        (1, 4, "off by bias, which is added once too often"),
        (-1, 4, "off by -bias, which is missing"),
        (-2, 4, "off by -2 times bias: subtracted where it is to be added"),
        (-0.75, 4, "off by (1/4 - 1) times bias: divided by the size of tp where it is due whole"),
    ],
)
def test_off_by_another_tensor(exact: bool, multiple: float, n: int, said: str) -> None:
    planted = Planted((3, 4, 8), Split(-1, "tp"), Mesh.of(tp=n), exact)
    others = {"weight": planted.fresh((8, 5)), "bias": planted.fresh((8,)), "y": planted.fresh((3, 4, 8))}
    others["output_bias[0]"] = np.broadcast_to(others["bias"], (3, 1, 8))
    planted.got = planted.parts(planted.want + multiple * others["bias"])
    assert said in (off_by_another_tensor(planted.evidence(others=others)) or "")
    assert spoiled(planted, off_by_another_tensor, others=others) is None
    assert off_by_another_tensor(planted.evidence()) is None, "nothing is known of the others"
    without = {name: values for name, values in others.items() if "bias" not in name}
    assert off_by_another_tensor(planted.evidence(others=without)) is None


def test_a_multiple_of_the_tensor_itself_is_a_factor() -> None:
    planted = Planted((4, 8), Split(-1, "tp"), TP2)
    planted.got = [2 * part for part in planted.got]
    others = {"x": planted.want, "y": -3 * planted.want}
    assert off_by_another_tensor(planted.evidence(others=others)) is None


def test_two_tensors_that_explain_the_same_error() -> None:
    planted = Planted((4, 8), Split(-1, "tp"), TP2)
    bias = planted.fresh((8,))
    planted.got = planted.parts(planted.want + bias)
    assert off_by_another_tensor(planted.evidence(others={"bias": bias})) is not None
    assert off_by_another_tensor(planted.evidence(others={"bias": bias, "minus": -bias})) is None


@pytest.mark.parametrize(
    ("offset", "mesh", "said"),
    [
        (math.log(4), TP4, "log(tp) too large: as if the sum under the logarithm were added up over the ranks once"),
        (-math.log(4), TP4, "log(tp) too small: as if the sum under the logarithm were averaged over the ranks"),
        (math.log(6), Mesh.of(tp=2, dp=3), "log(tp x dp) too large"),
        (math.log(2), Mesh.of(tp=2, dp=2), "log(tp or dp) too large"),
        (1.25, TP4, "every element of loss[0] is off by the same number, 1.25"),
    ],
)
def test_off_by_a_constant(offset: float, mesh: Mesh, said: str) -> None:
    planted = Planted((8, 5), Split(0, "tp"), mesh, exact=False)
    planted.got = [part + offset for part in planted.got]
    found = off_by_a_constant(planted.evidence(name="loss[0]"))
    assert found is not None
    assert said in found
    assert "log" not in str(off_by_a_constant(planted.evidence(name="weight"))), "no logarithm is in it"
    assert spoiled(planted, off_by_a_constant) is None


def test_one_number_is_no_constant() -> None:
    planted = Planted((1, 3), Split(0, "tp"), TP2, exact=False)
    planted.got = [part + 1.25 for part in planted.got]
    assert off_by_a_constant(planted.evidence()) is None
    planted = Planted((8, 5), Each("tp"), Mesh.of(tp=8), exact=False)
    planted.want[:] = 2.0
    planted.got = planted.parts(planted.want + 1.25)
    assert off_by_a_constant(planted.evidence()) is None, "all equal before, all equal after"


def test_errors_just_above_their_tolerance_are_no_constant() -> None:
    planted = Planted((8, 5), Split(0, "tp"), TP2, exact=False)
    planted.got = [part + planted.random.uniform(1.1e-5, 1.9e-5, part.shape) for part in planted.got]
    assert len(planted.evidence().wrong_ranks) == 2
    assert off_by_a_constant(planted.evidence()) is None
    planted.got = planted.parts(planted.want + 1e-3)
    assert "off by the same number, 0.00099" in (off_by_a_constant(planted.evidence()) or "")
