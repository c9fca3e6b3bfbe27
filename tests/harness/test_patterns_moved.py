"""Right values in the wrong place."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from test_patterns_evidence import EXACT_AND_NOT, TP2, TP4, TP_DP, Planted, Values, spoiled

from harness.oracle.patterns import PATTERNS
from harness.oracle.patterns.evidence import Evidence
from harness.oracle.patterns.moved import moved_shards, shifted_cut, transposed
from harness.oracle.patterns.reordered import assembled, joined_along_the_wrong_dimension, reordered_slices
from reference.layout import Each, Split, Whole
from reference.mesh import Mesh

TP3 = Mesh.of(tp=3)


def exchanged(planted: Planted, sources: dict[int, int]) -> None:
    before = [part.copy() for part in planted.got]
    for rank, source in sources.items():
        planted.got[rank] = before[source]


@EXACT_AND_NOT
@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ({0: 1, 1: 0}, "rank 0 holds the slice of x that belongs to rank 1 and rank 1 holds the slice of x that"),
        ({2: 1}, "rank 2 holds the slice of x that belongs to rank 1: shards in the wrong order"),
        ({0: 1, 1: 2, 2: 3, 3: 0}, "rank 0 holds the slice of x that belongs to rank 1, rank 1 that of 2, 2 that of 3"),
    ],
)
def test_shards_of_other_ranks(exact: bool, sources: dict[int, int], said: str) -> None:
    planted = Planted((8, 5), Split(0, "tp"), TP4, exact)
    exchanged(planted, sources)
    assert said in (moved_shards(planted.evidence()) or "")
    assert spoiled(planted, moved_shards) is None


def test_the_nearest_owner_is_named() -> None:
    planted = Planted((6, 4), Split(0, "tp"), TP_DP)  # replicated over dp
    exchanged(planted, {2: 3})
    assert "rank 2 holds the slice of x that belongs to rank 3" in (moved_shards(planted.evidence()) or "")
    planted = Planted((3, 4, 4), (Each("dp"), Split(-1, "tp")), TP_DP)
    exchanged(planted, {1: 3})
    assert "rank 1 holds the slice of x that belongs to rank 3" in (moved_shards(planted.evidence()) or "")


def test_shards_that_are_alike_or_tiny_are_not_told_apart() -> None:
    planted = Planted((8, 5), Split(0, "tp"), TP4)
    planted.want[2:4] = planted.want[:2]
    planted.got = planted.parts(planted.want)
    exchanged(planted, {0: 1, 1: 0})
    assert planted.evidence().wrong_ranks == ()
    planted = Planted((4,), Split(0, "tp"), TP4)
    planted.want = np.array([1.0, 2.0, 3.0, 4.0])
    planted.got = planted.parts(planted.want)
    exchanged(planted, {0: 1, 1: 0, 2: 3, 3: 2})
    assert moved_shards(planted.evidence()) is None


@EXACT_AND_NOT
def test_a_cut_of_other_sizes(exact: bool) -> None:
    planted = Planted((9, 5), Split(0, "tp", sizes=(2, 2, 2, 3)), TP4, exact)
    planted.got[2] = planted.want[3:5].copy()
    said = shifted_cut(planted.evidence())
    assert said is not None
    assert "rank 2's x is a slice that starts elsewhere along dimension 0 (rank 2: at 3 instead of 4)" in said
    assert spoiled(planted, shifted_cut) is None
    planted.got[1] = planted.want[1:3].copy()
    assert "on ranks 1 and 2, x is a slice that starts elsewhere" in (shifted_cut(planted.evidence()) or "")
    planted.got[0] = planted.fresh((2, 5))
    assert shifted_cut(planted.evidence()) is None


def test_a_shift_counts_dimensions_of_the_global_tensor() -> None:
    planted = Planted((3, 2, 8), (Each("dp"), Split(-1, "tp")), TP_DP)
    planted.got[3] = planted.want[1, :, 3:7].copy()
    assert "along dimension 2 (rank 3: at 3 instead of 4)" in (shifted_cut(planted.evidence()) or "")


@EXACT_AND_NOT
def test_a_transpose(exact: bool) -> None:
    planted = Planted((4, 4), Whole(), TP2, exact)
    planted.got = [part.T.copy() for part in planted.got]
    said = transposed(planted.evidence())
    assert said == "every rank's x is transposed: dimensions 0 and 1 of the rank's part are swapped"
    assert spoiled(planted, transposed) is None
    planted = Planted((6, 5), Split(0, "tp"), TP2, exact)
    planted.got = [part.T.reshape(3, 5).copy() for part in planted.got]
    assert "in the order of its transpose (dimensions 0 and 1" in (transposed(planted.evidence()) or "")
    assert spoiled(planted, transposed) is None


def test_a_symmetric_matrix_has_no_transpose_and_a_vector_neither() -> None:
    for shape in ((4, 4), (4,)):
        planted = Planted(shape, Whole(), TP2)
        if len(shape) == 2:
            planted.want = planted.want + planted.want.T
        planted.got = planted.parts(planted.want)
        planted.got[1][0] += 40
        assert transposed(planted.evidence()) is None


def joined(pieces: list[Values], shape: tuple[int, ...]) -> Values:
    """An all-gather along the first dimension and a view, as a rank would do it."""
    return np.concatenate(pieces, axis=0).reshape(shape)


@EXACT_AND_NOT
@pytest.mark.parametrize(("shape", "dim"), [((3, 4), 1), ((2, 3, 4), 2), ((2, 4, 3), 1)])
def test_pieces_joined_along_the_wrong_dimension(exact: bool, shape: tuple[int, ...], dim: int) -> None:
    planted = Planted(shape, Whole(), TP2, exact)
    planted.got = [joined(np.split(part, 2, axis=dim), shape) for part in planted.got]
    said = joined_along_the_wrong_dimension(planted.evidence())
    assert said is not None
    assert f"every rank's x has the pieces of dimension {dim}" in said
    assert ("(the last)" in said) is (dim == len(shape) - 1)
    assert spoiled(planted, joined_along_the_wrong_dimension) is None


def test_uneven_pieces_travel_padded() -> None:
    planted = Planted((3, 5), Whole(), TP2)
    for rank, part in enumerate(planted.got):
        pieces = [part[:, :3], np.pad(part[:, 3:], ((0, 0), (0, 1)))]
        planted.got[rank] = joined(pieces, (3, 6))[:, :5]
    assert "has the pieces of dimension 1 (the last) of tp one after" in (
        joined_along_the_wrong_dimension(planted.evidence()) or ""
    )


def test_one_row_is_joined_alike_along_both() -> None:
    planted = Planted((1, 6), Whole(), TP2)
    planted.got = [joined(np.split(part, 2, axis=1), (1, 6)) for part in planted.got]
    assert planted.evidence().wrong_ranks == ()


def interleaved(length: int, n: int) -> list[int]:
    return [int(i) for piece in np.arange(length).reshape(n, -1).T for i in piece]


@EXACT_AND_NOT
@pytest.mark.parametrize(
    ("order", "said"),
    [
        ([0, 1, 5, 3, 4, 2, 6, 7], "x: indices 2 and 5 are swapped along dimension {}"),
        (interleaved(8, 4), "x: the pieces of tp are interleaved, one index of each in turn, along dimension {}"),
        (list(np.argsort(interleaved(8, 4))), "x: the indices are dealt out to the pieces of tp in turn"),
        ([7, 6, 5, 4, 3, 2, 1, 0], "x: the order is reversed along dimension {}"),
        ([6, 7, 0, 1, 2, 3, 4, 5], "x: the order is rotated by -2 along dimension {}"),
        ([1, 2, 0, 3, 4, 5, 6, 7], "x: indices 0 to 2 are in another order along dimension {}"),
    ],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_slices_in_another_order(exact: bool, order: list[int], said: str, dim: int) -> None:
    planted = Planted((8, 8), Split(1, "tp"), TP4, exact)
    planted.got = planted.parts(planted.want.take(order, axis=dim))
    assert said.format(dim) in (reordered_slices(planted.evidence()) or "")
    assert spoiled(planted, reordered_slices) is None


@EXACT_AND_NOT
def test_another_order_on_one_replica(exact: bool) -> None:
    planted = Planted((6, 5), Whole(), TP2, exact)
    planted.got[1] = planted.got[1][[0, 4, 2, 3, 1, 5]]
    assert (
        reordered_slices(planted.evidence()) == "x on rank 1: indices 1 and 4 are swapped along dimension 0 of the part"
    )
    planted.got[0] = planted.got[0][[1, 0, 2, 3, 4, 5]]
    assert reordered_slices(planted.evidence()) == "x: the slices along dimension 0 of the part are in another order"
    assert spoiled(planted, reordered_slices) is None


def test_few_values_are_in_another_order_by_chance() -> None:
    planted = Planted((6,), Whole(), TP2)
    planted.want = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    planted.got = planted.parts(planted.want[[1, 2, 0, 5, 3, 4]])
    assert reordered_slices(planted.evidence()) is None
    for values in itertools.permutations([0.0, 1.0, 2.0]):
        planted = Planted((3,), Whole(), TP2)
        planted.want, planted.got = np.array([0.0, 1.0, 2.0]), [np.array(values)] * 2
        assert reordered_slices(planted.evidence()) is None


def test_a_tensor_is_put_together_where_replicas_agree() -> None:
    planted = Planted((3, 8, 4), (Each("dp"), Split(0, "tp")), Mesh.of(tp=2, dp=3, pp=2))
    whole = assembled(planted.evidence())
    assert whole is not None
    assert np.array_equal(whole, planted.want)
    planted.got[7][1, 2] += 1
    assert assembled(planted.evidence()) is None


@pytest.mark.parametrize("pattern", [moved_shards, shifted_cut, transposed, joined_along_the_wrong_dimension])
def test_noise_is_no_move(pattern: Callable[[Evidence], str | None]) -> None:
    for seed in range(30):
        planted = Planted((3, 3), (Whole(), Split(0, "tp"))[seed % 2], TP3, exact=seed % 4 < 2, seed=seed)
        planted.got = planted.parts(planted.fresh((3, 3)))
        assert pattern(planted.evidence()) is None
    assert pattern.__name__ in PATTERNS
