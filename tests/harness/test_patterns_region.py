"""Where wrong elements lie, and the damage as counted."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from test_patterns_evidence import EXACT_AND_NOT, TP2, TP4, TP_DP, Planted

from harness.oracle.patterns.damage import damage
from harness.oracle.patterns.evidence import Evidence
from harness.oracle.patterns.region import (
    at_the_borders,
    not_finite,
    one_element,
    one_slice,
    only_some_ranks,
    past_an_index,
    says_where,
)
from reference.layout import Each, Partial, Split, Whole
from reference.mesh import Mesh


@EXACT_AND_NOT
@pytest.mark.parametrize(
    ("value", "said"), [(math.nan, "NaN"), (math.inf, "infinity"), (-math.inf, "infinity")], ids=str
)
def test_what_is_not_finite(exact: bool, value: float, said: str) -> None:
    planted = Planted((8, 5), Split(0, "tp"), TP4, exact)
    planted.got[2][1, 3] = value
    assert not_finite(planted.evidence()) == f"x has {said} where a finite value is due, on rank 2 only"
    for part in planted.got:
        part[0, 0] = value
    assert not_finite(planted.evidence()) == f"x has {said} where a finite value is due, on every rank"
    planted.got[0][1, 1] += 7
    assert not_finite(planted.evidence()) is None, "something else is wrong too"


def test_nan_and_infinity_together_and_where_they_are_missing() -> None:
    planted = Planted((8, 5), Split(0, "tp"), TP2)
    planted.got[0][0, :2] = math.nan, math.inf
    assert "has NaN or infinity where" in (not_finite(planted.evidence()) or "")
    planted.want[6, 0] = math.nan
    planted.got = planted.parts(planted.want)
    assert not_finite(planted.evidence()) is None
    planted.got[1][2, 0] = 0.0
    assert not_finite(planted.evidence()) == "x is finite where NaN or infinity is due on rank 1"


def test_a_single_element() -> None:
    planted = Planted((8, 5), Split(0, "tp"), TP_DP)
    planted.got[1][2, 3] += 1
    assert one_element(planted.evidence()) == "a single element of x, [6, 3], is wrong on rank 1"
    planted.got[3][2, 3] += 1
    planted.got[5][2, 3] += 1
    assert one_element(planted.evidence()) == "a single element of x, [6, 3], is wrong on ranks 1, 3 and 5"
    planted.got[5][2, 2] += 1
    assert one_element(planted.evidence()) is None
    planted = Planted((4,), Whole(), TP2)
    planted.got[0][1] += 1
    assert one_element(planted.evidence()) is None, "of so few elements one is a quarter"


def test_a_border_between_two_tokens_is_none_of_buckets() -> None:
    """What a token does not see, and where it stands, begins there too; parameters are what buckets hold."""
    planted = Planted((8, 5), Split(0, "tp"), TP2)
    for first, between in ((20, True), (17, False)):
        wrong = planted.want.copy()
        wrong.ravel()[first:] += 1000
        planted.got = planted.parts(wrong)
        for name in ("output[0]", "input[1].grad", "weight.grad"):
            evidence = dataclasses.replace(planted.evidence(), name=name)
            silent = between and name != "weight.grad"
            assert (past_an_index(evidence) is None) == silent, (name, first)


def test_sentences_that_say_where_and_sentences_that_say_why() -> None:
    for place in (
        "weight.grad is wrong on rank 1 (pp=1) only",
        "x is wrong only where tp=1, though other ranks hold the same part",
        "x is wrong only from flat index 17 of 40 on: as if a buffer or bucket ended there",
        "a single element of x, [6, 3], is wrong on rank 1",
        "x has NaN where a finite value is due, on rank 2 only",
        "every element of x is 1.01968 times what it should be",
        "every element of x is -3e-05 times what it should be on rank 1",
        "every element of x is off by the same number, 4.5",
    ):
        assert says_where(place), place
    for why in (
        "q_norm_weight.grad covers only the rank's own heads: the sum over tp after the last backward is missing",
        "rank 1's x equals the unreduced partial over tp: an all-reduce is missing in backward",
        "x is 2 times too large",
    ):
        assert not says_where(why), why


def test_past_an_index() -> None:
    planted = Planted((8, 5), Split(0, "tp"), TP2)
    wrong = planted.want.copy()
    wrong.ravel()[17:] += 1000
    planted.got = planted.parts(wrong)
    assert past_an_index(planted.evidence()) == (
        "x is wrong only from flat index 17 of 40 on: as if a buffer or bucket ended there"
    )
    planted.got[0][1, 1] += 1
    assert past_an_index(planted.evidence()) is None
    wrong.ravel()[20:30] = planted.want.ravel()[20:30]
    planted.got = planted.parts(wrong)
    assert past_an_index(planted.evidence()) is None, "a hole in the middle"
    planted.got = planted.parts(planted.want)
    planted.got[1][-1, -1] += 1
    assert past_an_index(planted.evidence()) is None, "one element is no tail"


@pytest.mark.parametrize(("index", "said"), [(-1, "last"), (0, "first")])
def test_the_borders_of_shards(index: int, said: str) -> None:
    planted = Planted((3, 12), Split(-1, "tp"), TP4)
    for rank in (1, 2, 3):
        planted.got[rank][:, index] += 1000
    found = at_the_borders(planted.evidence())
    assert found == (
        f"x is wrong only at the {said} index of dimension -1 of each shard, where it is cut on ranks 1 to 3"
    )
    planted.got[2][:, 1] += 1000
    assert at_the_borders(planted.evidence()) is None
    planted = Planted((3, 8), Split(-1, "tp"), TP4)
    for part in planted.got:
        part[:, index] += 1000
    assert at_the_borders(planted.evidence()) is None, "half of two columns"


def test_only_some_ranks() -> None:
    planted = Planted((3, 8, 4), (Each("dp"), Split(0, "tp")), TP_DP)
    planted.got[3][0] += 1000
    assert only_some_ranks(planted.evidence()) == "x is wrong on rank 3 (tp=1, dp=1) only"
    planted.got[1][1] += 1000
    assert only_some_ranks(planted.evidence()) == "x is wrong only where tp=1"
    planted.got[2][1] += 1000
    assert only_some_ranks(planted.evidence()) is None
    planted = Planted((8, 4), Split(0, "tp"), TP_DP)
    planted.got[3][0] += 1000
    assert "is wrong on rank 3 (tp=1, dp=1) only, though other ranks hold the same part" in (
        only_some_ranks(planted.evidence()) or ""
    )
    planted = Planted((1, 4), Split(0, "tp"), TP2)
    planted.got[0][:] += 1000
    assert only_some_ranks(planted.evidence()) is None, "the other rank holds nothing"


def test_one_slice() -> None:
    planted = Planted((8, 5), Split(0, "tp"), TP2)
    planted.got[1][:, 2] += 1000
    planted.got[0][:, 2] += 1000
    assert one_slice(planted.evidence()) == "x is wrong only at index 2 of dimension 1"
    planted.got[0][0, 3] += 1000
    assert one_slice(planted.evidence()) is None


def test_the_damage_is_counted() -> None:
    planted = Planted((3, 8, 4), (Each("dp"), Split(0, "tp")), TP_DP)
    planted.want[:] = 4.0
    planted.got = planted.parts(planted.want)
    planted.got[3][1, 2] = 4.5
    planted.got[3][3, 2] = -5.0
    planted.got[5][3, 0] = 5.0
    found = damage(planted.evidence())
    assert (found.wrong, found.total, found.share) == (3, 96, 3 / 96)
    assert found.per_rank == ((0, 16), (0, 16), (0, 16), (2, 16), (0, 16), (1, 16))
    assert found.dimensions == ((1, 2), (5, 7), (0, 2))
    assert found.worst is not None
    assert (found.worst.rank, found.worst.place) == (3, "rank 3 (tp=1, dp=1)")
    assert (found.worst.index, found.worst.local_index) == ((1, 7, 2), (3, 2))
    assert (found.worst.got, found.worst.want, found.worst.error) == (-5.0, 4.0, 9.0)
    assert (found.worst.tolerances, found.worst.ulps) == (None, 9 * 2.0**21)
    assert found.lines() == [
        "wrong: 3 of 96 elements (3%); rank 3: 2 of 16, rank 5: 1 of 16",
        "only at dimension 0: 1 and 2 of 0 to 2; dimension 1: 5 and 7 of 0 to 7; dimension 2: 0 and 2 of 0 to 3",
        "worst: [1, 7, 2] (local [3, 2]) on rank 3 (tp=1, dp=1): got -5.0, want 4.0, off by 9",
    ]


def test_the_worst_is_the_one_furthest_beyond_its_tolerance() -> None:
    want, tolerance = np.array([1000.0, 1.0, 1.0]), np.array([10.0, 0.01, 0.0])
    got = np.array([1100.0, 2.0, 1.0])
    found = damage(Evidence("x", want, Whole(), Mesh(), (got,), tolerance, "float32"))
    assert found.worst is not None
    assert (found.worst.index, found.worst.tolerances) == ((1,), 100.0)
    assert "100 times the tolerance" in found.worst.text()
    for value in (math.nan, math.inf):
        got[0] = value
        found = damage(Evidence("x", want, Whole(), Mesh(), (got,), tolerance, "float32"))
        assert found.worst is not None
        assert found.worst.index == (0,)
        assert "not comparable" in found.worst.text()


def test_no_damage() -> None:
    planted = Planted((4, 4), Partial("tp"), TP2)
    found = damage(planted.evidence())
    assert (found.wrong, found.worst, found.share) == (0, None, 0.0)
    assert found.lines() == ["no element of 32 is wrong by itself"]
    empty = Planted((0, 4), Whole(), TP2)
    assert damage(empty.evidence()).share == 0.0
