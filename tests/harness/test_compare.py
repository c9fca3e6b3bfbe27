"""Exact comparison, from both sides: what is right passes, and one wrong element is named."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from drawing import Cut, cuts
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.observation import LocalTensor, Observation
from harness.oracle.compare import compare_exact, different, held_values, replicas_disagree, same_bits
from harness.verdict import Finding
from reference.layout import Each, Layout, Partial, Split, Whole, partial_axes, window
from reference.mesh import Mesh

Values = NDArray[np.float64]
TP_DP = Mesh.of(tp=2, dp=2)
WANT = np.arange(1.0, 13.0).reshape(3, 4)
#: float64 with a payload in the NaN.
OTHER_NAN = np.array([0x7FF8000000000001], dtype=np.uint64).view(np.float64)[0]


def held(cut: Cut, rng: np.random.Generator | None = None) -> list[Values]:
    """What the ranks hold when all is right; the summands of a partial tensor are random."""
    parts = [
        window(cut.values.shape, cut.layout, cut.mesh, rank).take(cut.values).copy() for rank in range(cut.mesh.size)
    ]
    axes = partial_axes(cut.layout)
    if axes and rng is not None:
        for group in cut.mesh.groups(axes).tolist():
            for rank in group[1:]:
                # The same on every replica: drawn from the place in the group and the values.
                summand = np.floor(parts[rank] * (cut.mesh.coordinate(rank, axes) + 1) / 3)
                parts[group[0]] -= summand
                parts[rank] = summand
    return parts


def elements(parts: list[Values]) -> list[tuple[int, tuple[int, ...]]]:
    """Every element of every rank."""
    return [(rank, local) for rank, part in enumerate(parts) for local in np.ndindex(part.shape)]


def observed(parts: list[Values], dtype: str = "float32", name: str = "x") -> list[Observation]:
    return [Observation({name: LocalTensor(values, dtype)}) for values in parts]


def compared(cut: Cut, parts: list[Values]) -> Finding | None:
    return compare_exact("x", cut.values, cut.layout, "float32", cut.mesh, observed(parts))


def whole(*parts: Values, layout: Layout = Whole(), mesh: Mesh = TP_DP, want: Values = WANT) -> Finding | None:  # noqa: B008
    return compare_exact("x", want, layout, "float32", mesh, observed(list(parts)))


@given(cuts(partial=True), st.integers(0, 99))
def test_what_is_right_passes(cut: Cut, seed: int) -> None:
    parts = held(cut, np.random.default_rng(seed))
    assert compared(cut, parts) is None
    assert replicas_disagree("x", cut.layout, cut.mesh, observed(parts), cut.values.shape) is None


@given(cuts(partial=True, smallest=1), st.data())
def test_one_wrong_element_is_named(cut: Cut, data: st.DataObject) -> None:
    parts = held(cut, np.random.default_rng(0))
    rank, local = data.draw(st.sampled_from(elements(parts)), label="rank and element")
    wrong = data.draw(st.sampled_from([1.0, -0.5, math.inf, -math.inf, math.nan]), label="added")
    parts[rank][local] += wrong
    finding = compared(cut, parts)
    assert finding is not None
    # A wrong summand makes the sum wrong on its whole group, whose first rank speaks for it.
    first = cut.mesh.group_of(rank, partial_axes(cut.layout))[0]
    index = window(cut.values.shape, cut.layout, cut.mesh, rank).global_index(local)
    assert (finding.kind, finding.tensor) == ("mismatch", "x")
    assert (finding.rank, finding.place) == (first, cut.mesh.describe(first))
    assert (finding.local_index, finding.index) == (local, index)
    assert finding.want == cut.values[index]
    assert finding.got is not None
    np.testing.assert_equal(finding.got, cut.values[index] + wrong)


def test_the_message_counts_elements_and_ranks() -> None:
    parts = [WANT.copy() for _ in range(4)]
    parts[3][2, 1] = parts[1][0, 3] = parts[1][2, 3] = 0
    finding = whole(*parts)
    assert finding == Finding(
        "mismatch",
        "x differs from one process on rank 1, rank 3: 3 of 48 elements",
        1,
        "rank 1 (tp=1, dp=0)",
        "x",
        (0, 3),
        (0, 3),
        0.0,
        4.0,
        details="layout: Whole()",
    )
    finding = whole(*[WANT + 1] * 4)
    assert finding is not None
    assert finding.message == "x differs from one process on every rank: 48 of 48 elements"


def test_the_first_wrong_element_of_a_shard() -> None:
    want = np.arange(24.0).reshape(2, 3, 4)
    layout = (Each("dp"), Split(1, "tp"))
    parts = held(Cut(TP_DP, layout, want))
    parts[3][1, 1] = parts[3][2, 0] = -1
    finding = whole(*parts, layout=layout, want=want)
    assert finding is not None
    assert (finding.place, finding.local_index, finding.index) == ("rank 3 (tp=1, dp=1)", (1, 1), (1, 1, 3))
    assert (finding.got, finding.want) == (-1, 19)
    assert "Split(1, 'tp'" in finding.details


@pytest.mark.parametrize("value", [math.nan, OTHER_NAN, math.inf, -math.inf, 0.0, -0.0])
@pytest.mark.parametrize("want", [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0])
def test_values_that_are_not_plain_numbers(value: float, want: float) -> None:
    """NaN belongs where NaN is expected and nowhere else; infinities have a sign; zeros have none that counts."""
    right = math.isnan(value) if math.isnan(want) else bool(value == want)
    got, expected = np.full((1,), value), np.full((1,), want)
    assert bool(different(got, expected)[0]) is not right
    finding = whole(got, mesh=Mesh(), want=expected)
    assert (finding is None) is right
    if finding is not None:
        np.testing.assert_equal([finding.got, finding.want], [value, want])


def test_partial_sums_are_added_before_they_are_judged() -> None:
    halves = np.floor(WANT / 3)
    parts = [halves, WANT - halves, halves, WANT - halves]
    assert whole(*parts, layout=Partial("tp")) is None
    assert whole(*parts, layout=Partial("dp")) is not None, "along the wrong axis"
    assert whole(*parts, layout=Partial(("tp", "dp")), want=2 * WANT) is None
    assert whole(*parts) is not None, "not declared partial"
    finding = whole(*[WANT] * 4, layout=Partial("tp"))
    assert finding is not None
    assert (finding.got, finding.want) == (2.0, 1.0), "a sum already made counts twice"


@pytest.mark.parametrize(
    ("rank", "changed", "message"),
    [
        (1, None, "x is missing on rank 1 (tp=1, dp=0)"),
        (2, LocalTensor(WANT.T.copy(), "float32"), "x has local shape (4, 3); expected (3, 4) on rank 2 (tp=0, dp=1)"),
        (2, LocalTensor(WANT.ravel(), "float32"), "x has local shape (12,); expected (3, 4) on rank 2 (tp=0, dp=1)"),
        (3, LocalTensor(WANT, "float64"), "x has dtype float64; expected float32 on rank 3 (tp=1, dp=1)"),
        (0, LocalTensor(None, "int64", problem="is an int"), "x is an int on rank 0 (tp=0, dp=0)"),
        (0, LocalTensor(None, "float32"), "x holds no values on rank 0 (tp=0, dp=0)"),
    ],
)
def test_what_has_the_wrong_form_is_named(rank: int, changed: LocalTensor | None, message: str) -> None:
    ranks = observed([WANT] * 4)
    ranks[rank] = Observation({"x": changed})
    finding = compare_exact("x", WANT, Whole(), "float32", TP_DP, ranks)
    assert finding == Finding("mismatch", message, rank, TP_DP.describe(rank), "x")


def test_a_tensor_that_is_not_reported_at_all_is_missing() -> None:
    finding = compare_exact("y", WANT, Whole(), "float32", TP_DP, observed([WANT] * 4))
    assert finding is not None
    assert finding.message == "y is missing on rank 0 (tp=0, dp=0)"


def test_what_must_not_exist_is_named() -> None:
    absent = [Observation({"x": None}) for _ in range(4)]
    assert compare_exact("x", None, Whole(), "float32", TP_DP, absent) is None
    assert compare_exact("y", None, Whole(), "float32", TP_DP, absent) is None
    absent[2] = Observation({"x": LocalTensor(np.zeros((3, 4)), "float32")})
    finding = compare_exact("x", None, Whole(), "float32", TP_DP, absent)
    assert finding is not None
    assert (finding.rank, finding.tensor) == (2, "x")
    assert finding.message == "x exists, but nothing that it belongs to asks for a gradient on rank 2 (tp=0, dp=1)"


@given(cuts(partial=True, smallest=1, copies=True), st.data())
def test_one_bit_of_one_replica_is_seen(cut: Cut, data: st.DataObject) -> None:
    parts = held(cut)
    rank, local = data.draw(st.sampled_from(elements(parts)), label="rank and element")
    bits = parts[rank][local].view(np.uint64) ^ np.uint64(1)
    parts[rank][local] = bits.view(np.float64)
    finding = replicas_disagree("x", cut.layout, cut.mesh, observed(parts), cut.values.shape)
    copies = cut.mesh.group_of(rank, cut.replica_axes)
    late = rank if rank != copies[0] else copies[1]
    assert finding is not None
    assert (finding.kind, finding.rank, finding.place) == ("disagree", late, cut.mesh.describe(late))
    assert f"{cut.mesh.describe(copies[0])} and {cut.mesh.describe(late)}" in finding.message


def test_replicas_are_compared_bit_by_bit() -> None:
    for one, other in ((0.0, -0.0), (math.nan, OTHER_NAN), (1.0, np.nextafter(1.0, 2.0))):
        parts = [np.array([5.0, one]), np.array([5.0, other])]
        assert not same_bits(*parts)
        mesh = Mesh.of(dp=2)
        finding = replicas_disagree("x", Whole(), mesh, observed(parts), (2,))
        assert finding is not None
        assert finding.message == "x is replicated on rank 0 (dp=0) and rank 1 (dp=1), but its bits differ"
        assert replicas_disagree("x", Each("dp"), mesh, observed(parts), (2, 2)) is None, "not replicas"
        assert replicas_disagree("x", Split(0, "dp"), mesh, observed(parts), (4,)) is None, "not replicas"
        assert replicas_disagree("x", Partial("dp"), mesh, observed(parts), (2,)) is None, "not replicas"


def test_copies_of_a_piece_are_replicas() -> None:
    parts = [np.array([1.0]), np.array([1.0]), np.array([2.0]), np.array([3.0])]
    mesh, split = Mesh.of(tp=4), Split(0, "tp", copies=2)
    finding = replicas_disagree("x", split, mesh, observed(parts), (2,))
    assert finding is not None
    assert finding.message == "x is replicated on rank 2 (tp=2) and rank 3 (tp=3), but its bits differ"
    assert replicas_disagree("x", split, mesh, observed([*parts[:3], parts[2]]), (2,)) is None


def test_same_bits_looks_at_shape_and_not_at_memory_order() -> None:
    assert same_bits(WANT, np.asfortranarray(WANT))
    assert same_bits(np.array([math.nan]), np.array([math.nan]))
    assert not same_bits(WANT, WANT.reshape(4, 3))


def test_ranks_without_the_tensor_are_no_replicas() -> None:
    ranks = observed([WANT, WANT + 1])
    for absent in (Observation(), Observation({"x": None}), Observation({"x": LocalTensor(None, "float32")})):
        assert replicas_disagree("x", Whole(), Mesh.of(dp=2), [ranks[0], absent], (3, 4)) is None
    assert replicas_disagree("x", Whole(), Mesh.of(dp=2), ranks, (3, 4)) is not None


def test_opposite_infinities_in_parts_of_a_sum_are_nan_without_a_warning() -> None:
    parts = [np.array([np.inf, 1.0]), np.array([-np.inf, 2.0])]
    want = np.array([np.nan, 3.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sums = held_values("x", (2,), Partial("tp"), "float32", Mesh.of(tp=2), observed(parts))
    assert isinstance(sums, list)
    assert all(not different(values, want).any() for values in sums)
