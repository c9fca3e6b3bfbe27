"""The evidence and the two questions about an explanation: does it fit, and could it fit by chance.

`Planted` makes the evidence for the tests of all patterns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.oracle.patterns.evidence import Evidence, Suspect
from harness.oracle.patterns.fit import Explanation, allowances, beyond, fit, information
from harness.oracle.patterns.formats import format_named, grid, rounded, ulp
from harness.oracle.patterns.wording import listed, numbers, of_ranks
from reference.dtypes import FORMATS
from reference.layout import Each, Layout, Split, Whole, window
from reference.mesh import Mesh

Values = NDArray[np.float64]
TP2, TP4, TP_DP = Mesh.of(tp=2), Mesh.of(tp=4), Mesh.of(tp=2, dp=3)
#: Both kinds of comparison that a pattern must work in.
EXACT_AND_NOT = pytest.mark.parametrize("exact", [True, False], ids=["exact", "within tolerance"])


@dataclass
class Planted:
    """Random data on ranks, of which a test spoils some. exact: whole numbers; else real ones, computed with noise of
    a tenth of their tolerance."""

    shape: tuple[int, ...]
    layout: Layout
    mesh: Mesh
    exact: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.want = self.fresh(self.shape)
        self.tolerance = None if self.exact else np.full(self.shape, 1e-5)
        self.got = self.parts(self.want)

    def fresh(self, shape: tuple[int, ...]) -> Values:
        if self.exact:
            return self.random.integers(-300, 300, size=shape).astype(np.float64)
        return self.random.standard_normal(shape)

    def parts(self, values: Values) -> list[Values]:
        """What each rank holds of a global array."""
        found = [window(values.shape, self.layout, self.mesh, r).take(values).copy() for r in range(self.mesh.size)]
        noise = 0.0 if self.exact else 1e-6
        return [part + noise * self.random.uniform(-1, 1, part.shape) for part in found]

    def evidence(self, **more: Any) -> Evidence:
        tolerance = more.pop("tolerance", self.tolerance)
        dtype, name = more.pop("dtype", "float32"), more.pop("name", "x")
        return Evidence(name, self.want, self.layout, self.mesh, tuple(self.got), tolerance, dtype, **more)


def spoiled(planted: Planted, pattern: Callable[[Evidence], str | None], **more: Any) -> str | None:
    """What the pattern says when one more element is wrong than it explains."""
    rank = max(range(planted.mesh.size), key=lambda r: planted.got[r].size)
    at = tuple(n - 1 for n in planted.got[rank].shape)
    before = planted.got[rank]
    planted.got[rank] = before.copy()
    planted.got[rank][at] += 3.25
    said = pattern(planted.evidence(**more))
    planted.got[rank] = before
    return said


@EXACT_AND_NOT
def test_what_is_right_has_no_wrong_elements(exact: bool) -> None:
    planted = Planted((3, 6, 4), (Each("dp"), Split(0, "tp")), TP_DP, exact)
    assert planted.evidence().wrong_ranks == ()
    planted.got[4][1, 2] = math.nan
    found = planted.evidence()
    assert found.wrong_ranks == (4,)
    assert [tuple(at) for at in np.argwhere(found.wrong[4])] == [(1, 2)]


def test_tolerances_that_are_no_plain_numbers() -> None:
    tolerance = np.array([math.nan, math.inf, 0.5, 0.0])
    found = Evidence("x", np.zeros(4), Whole(), Mesh(), (np.array([0.1, math.nan, 0.5, 0.0]),), tolerance)
    assert found.wrong[0].tolist() == [True, False, False, False]
    want = np.array([math.inf, math.nan, -math.inf, math.inf])
    found = Evidence("x", want, Whole(), Mesh(), (np.array([math.inf, math.nan, math.inf, 1.0]),), np.ones(4))
    assert found.wrong[0].tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("got", "tolerance", "message"),
    [
        ([np.zeros(2)], None, "values of 1 ranks on a mesh of 2"),
        ([np.zeros(2), np.zeros(3)], None, r"rank 1 holds shape \(3,\); expected \(2,\)"),
        ([np.zeros(2), np.zeros(2)], np.zeros(2), r"tolerance of shape \(2,\); expected \(4,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(got: list[Values], tolerance: Values | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Evidence("x", np.zeros(4), Split(0, "tp"), TP2, tuple(got), tolerance)


def test_a_suspect_is_global_or_local_or_one_a_rank() -> None:
    planted = Planted((6, 4), Split(0, "tp"), TP2)
    found = planted.evidence()
    for values in (planted.want, tuple(planted.got), (planted.want, planted.got[1])):
        parts = found.of_suspect(Suspect("is right", values))
        assert parts is not None
        assert all(np.array_equal(a, b) for a, b in zip(parts, planted.got, strict=True))
    assert found.of_suspect(Suspect("has another shape", np.zeros((4, 6)))) is None
    assert found.of_suspect(Suspect("is of too few ranks", (planted.want,))) is None


def test_the_sizes_that_a_factor_may_come_from() -> None:
    mesh = Mesh.of(tp=2, cp=1, dp=3, pp=4)
    found = Evidence("x", np.zeros(1), Whole(), mesh, (np.zeros(1),) * 24, micro_batches=5)
    assert dict(found.sizes) == {
        "tp": 2, "dp": 3, "pp": 4, "tp x dp": 6, "tp x pp": 8, "dp x pp": 12, "tp x dp x pp": 24, "micro-batches": 5,
    }  # fmt: skip
    assert Evidence("x", np.zeros(1), Whole(), Mesh(), (np.zeros(1),)).sizes == {}


def test_an_explanation_fits_or_not() -> None:
    planted = Planted((6, 4), Split(0, "tp"), TP2)
    wrong = planted.fresh((6, 4))
    planted.got = planted.parts(wrong)
    found = planted.evidence()
    explained = fit(found, Explanation(found.local(wrong)))
    assert explained is not None
    assert explained.everywhere
    assert explained.ranks == (0, 1)
    assert explained.sure(found, 1000)
    assert fit(found, Explanation(found.wants)) is None
    wrong[5, 3] += 1
    assert fit(found, Explanation(found.local(wrong))) is None, "one element differs"
    planted.got[0] = planted.parts(planted.want)[0]
    found = planted.evidence()
    planted.got = planted.parts(planted.want)
    assert fit(planted.evidence(), Explanation(found.wants)) is None, "nothing is wrong"


def test_a_fault_of_one_rank_fits_but_not_everywhere() -> None:
    planted = Planted((6, 4), Split(0, "tp"), TP2)
    planted.got[1] = 3 * planted.got[1]
    found = planted.evidence()
    explained = fit(found, Explanation(tuple(3 * want for want in found.wants)))
    assert explained is not None
    assert (explained.ranks, explained.everywhere) == ((1,), False)


@pytest.mark.parametrize(
    ("error", "choices", "sure"), [(5.0, 1, False), (5.0, 8, False), (255.0, 8, True), (255.0, 9, False)]
)
def test_few_values_fit_by_chance(error: float, choices: int, sure: bool) -> None:
    want = np.array([[7.0]])
    found = Evidence("x", want, Whole(), Mesh(), (want + error,), dtype="float32")
    explained = fit(found, Explanation((want + error,)))
    assert explained is not None
    assert explained.errors == (math.log2(1 + error),)
    assert explained.sure(found, choices) is sure


def test_what_repeats_counts_once() -> None:
    row, rng = np.array([3.0, 9.0, 27.0, 5.0]), np.random.default_rng(0)
    bits = math.log2(4) + math.log2(10) + math.log2(28) + math.log2(6)

    def told(want: Values, got: Values, mesh: Mesh = TP2, layout: Layout = ()) -> float:
        ranks = [window(want.shape, layout, mesh, r).take(got) for r in range(mesh.size)]
        found = Evidence("x", want, layout, mesh, tuple(ranks), dtype="float32")
        return sum(information(found, [np.zeros(part.shape) for part in ranks]))

    want = np.ones((6, 4))
    assert told(want, want + row) == pytest.approx(bits), "equal rows, and replicas"
    assert told(want, want + np.arange(6)[:, None] * row) > 2 * bits
    assert told(want, want + 1) == 1.0, "one error everywhere"
    assert told(want, want) == 0
    signs = rng.choice([-1.0, 1.0], size=(20, 20))
    assert told(np.ones((20, 20)), 1 + signs) > 300, "errors of two sizes, but in 400 places"


def test_near_and_beyond() -> None:
    got = np.array([1.0, 1.0, math.nan, math.nan, math.inf, -math.inf, 5.0])
    values = np.array([1.0, 1.5, math.nan, 1.0, math.inf, math.inf, math.nan])
    assert beyond(got, values, np.full(7, 0.5)).tolist() == [False, False, False, True, False, True, True]
    assert beyond(got, values, np.zeros(7)).tolist() == [False, True, False, True, False, True, True]
    assert not beyond(got, values, np.full(7, math.inf)).any()


def test_exact_explanations_may_round_where_the_format_cannot_hold_them() -> None:
    found = Evidence("x", np.zeros(3), Whole(), Mesh(), (np.ones(3),), dtype="bfloat16")
    assert allowances(found, [np.array([256.0, 255.0, 3.0])])[0].tolist() == [0, 0, 0]
    assert allowances(found, [np.array([257.0, 255.0, 3.0])])[0].tolist() == [2, 1, 2**-6]


def test_explanations_within_tolerance_may_be_off_by_twice_the_usual_one() -> None:
    tolerance = np.array([1.0, 7.0, math.inf])
    for scale in (1.0, 1e305, 1e-305):
        found = Evidence("x", np.zeros(3), Whole(), Mesh(), (np.zeros(3),), scale * tolerance)
        assert np.allclose(allowances(found, [np.zeros(3)])[0] / scale, [10, 14, math.inf])


def test_numbers_of_a_format() -> None:
    fp32, bf16 = FORMATS["fp32"], FORMATS["bf16"]
    assert format_named("bfloat16") == bf16
    assert format_named("float8_e4m3fn") == FORMATS["fp64"]
    values = np.array([1.0, 1.5, 2.0, 0.0, -255.0])
    assert ulp(values, bf16).tolist() == [2**-7, 2**-7, 2**-6, bf16.smallest, 1.0]
    assert ulp(np.array([math.nan, math.inf]), fp32).tolist() == [2.0**104] * 2
    assert rounded(np.array([257.0, 1e39, math.nan]), fp32)[1] == math.inf
    assert rounded(np.array([257.0]), bf16).tolist() == [256.0]
    for numbers_, step in (([3.0, 0.0], 1.0), ([4.0, 12.0], 4.0), ([0.75, math.nan, math.inf], 0.25), ([0.0], 1.0)):
        assert grid(np.array(numbers_)) == step


def test_words() -> None:
    assert [listed([1]), listed([1, 2]), listed([1, 2, 3], "or")] == ["1", "1 and 2", "1, 2 or 3"]
    assert numbers([0, 2, 3, 5, 6, 7, 9]) == "0, 2, 3, 5 to 7 and 9"
    assert numbers(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12, 14 and 12 more"
    found = Planted((4,), Whole(), TP4).evidence()
    assert of_ranks(found, (0, 1, 2, 3)) == "every rank's x"
    assert of_ranks(found, (2,)) == "rank 2's x"
    assert of_ranks(found, (0, 2)) == "on ranks 0 and 2, x"
    assert of_ranks(Planted((4,), Whole(), Mesh()).evidence(), (0,)) == "x"
