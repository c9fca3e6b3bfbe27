"""Windows: which part of a global tensor a rank holds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from drawing import Cut, cuts
from hypothesis import assume, given
from hypothesis import strategies as st

from reference.layout import (
    Each,
    Layout,
    Partial,
    Split,
    Whole,
    cut,
    layout_in_words,
    layout_text,
    partial_axes,
    placements,
    window,
    with_each,
)
from reference.mesh import Mesh

LENGTHS, PARTS = st.integers(0, 40), st.integers(1, 12)
TP_DP = Mesh.of(tp=2, dp=3)


@given(LENGTHS, PARTS)
def test_balanced_is_array_split(length: int, parts: int) -> None:
    assert cut(length, parts) == tuple(len(piece) for piece in np.array_split(np.arange(length), parts))


@given(LENGTHS, PARTS)
def test_chunk_is_torch_chunk_and_then_empty_pieces(length: int, parts: int) -> None:
    chunks = [len(piece) for piece in torch.chunk(torch.arange(length), parts)]
    assert cut(length, parts, "chunk") == (*chunks, *[0] * (parts - len(chunks)))


@given(cuts())
def test_every_replica_holds_every_element_exactly_once(drawn: Cut) -> None:
    held: dict[tuple[int, ...], list[float]] = {}
    for rank in range(drawn.mesh.size):
        replica = tuple(drawn.mesh.coordinate(rank, axis) for axis in drawn.replica_axes)
        part = window(drawn.values.shape, drawn.layout, drawn.mesh, rank)
        assert part.take(drawn.values).shape == part.shape
        held.setdefault(replica, []).extend(part.take(drawn.values).ravel())
    assert len(held) == np.prod([drawn.mesh.axis_size(axis) for axis in drawn.replica_axes], dtype=int)
    for elements in held.values():
        assert sorted(elements) == drawn.values.ravel().tolist()


@given(cuts(partial=True), st.data())
def test_global_index_is_the_inverse_of_take(drawn: Cut, data: st.DataObject) -> None:
    part = window(
        drawn.values.shape, drawn.layout, drawn.mesh, data.draw(st.integers(0, drawn.mesh.size - 1), label="rank")
    )
    local = part.take(drawn.values)
    for index in np.ndindex(local.shape):
        assert drawn.values[part.global_index(index)] == local[index]


@given(cuts(partial=True), st.data())
def test_take_is_a_view_of_arrays_and_of_tensors(drawn: Cut, data: st.DataObject) -> None:
    part = window(
        drawn.values.shape, drawn.layout, drawn.mesh, data.draw(st.integers(0, drawn.mesh.size - 1), label="rank")
    )
    before = part.take(drawn.values).copy()
    assume(before.size)
    array, tensor = drawn.values.copy(), torch.from_numpy(drawn.values.copy())
    part.take(array)[...] = -1.0
    part.take(tensor)[...] = -1.0
    assert np.array_equal(array, tensor.numpy())
    assert np.array_equal(array, np.where(np.isin(drawn.values, before), -1.0, drawn.values))


def test_an_element_of_each_is_an_array_too() -> None:
    part = window((3,), Each("dp"), TP_DP, 5)
    assert part.shape == ()
    taken = part.take(np.array([4.0, 5.0, 6.0]))
    assert isinstance(taken, np.ndarray)
    assert (taken.shape, float(taken)) == ((), 6.0)


@given(LENGTHS, st.permutations(["tp", "dp"]))
def test_nested_splits_cut_what_the_first_left(length: int, order: list[str]) -> None:
    layout = tuple(Split(0, axis) for axis in order)
    outer = np.array_split(np.arange(length), TP_DP.axis_size(order[0]))
    pieces = [np.array_split(piece, TP_DP.axis_size(order[1])) for piece in outer]
    for rank in range(6):
        at = [TP_DP.coordinate(rank, axis) for axis in order]
        assert np.array_equal(window((length,), layout, TP_DP, rank).take(np.arange(length)), pieces[at[0]][at[1]])


@given(LENGTHS)
def test_combined_axes_cut_in_the_order_of_the_ranks(length: int) -> None:
    pieces = np.array_split(np.arange(length), 6)
    for rank, axes in itertools.product(range(6), (("tp", "dp"), ("dp", "tp"))):
        assert np.array_equal(window((length,), Split(0, axes), TP_DP, rank).take(np.arange(length)), pieces[rank])


def test_given_sizes_and_negative_dimensions() -> None:
    mesh = Mesh.of(tp=3)
    split = Split(-1, "tp", sizes=(0, 4, 1))
    assert [window((2, 5), split, mesh, rank).ranges for rank in range(3)] == [
        ((0, 2), (0, 0)),
        ((0, 2), (0, 4)),
        ((0, 2), (4, 1)),
    ]
    part = window((2, 2, 5), (split, Each("dp")), Mesh.of(tp=3, dp=2), 4)
    assert (part.lead, part.ranges) == ((1,), ((0, 2), (0, 4))), "dimensions are those after Each"


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 12), st.sampled_from(["balanced", "chunk"]))
def test_neighbouring_ranks_hold_copies_of_one_piece(pieces: int, copies: int, length: int, rule: Any) -> None:
    mesh = Mesh.of(dp=2, tp=pieces * copies, order="dp-tp")
    layout = Split(0, "tp", rule=rule, copies=copies)
    held = [window((length,), layout, mesh, rank).ranges[0] for rank in range(mesh.size)]
    lengths = cut(length, pieces, rule)
    starts = np.cumsum([0, *lengths]).tolist()
    assert held == [(starts[r // 2 // copies], lengths[r // 2 // copies]) for r in range(mesh.size)]


def test_copies_have_one_size_a_piece() -> None:
    split = Split(0, "tp", sizes=(1, 3), copies=2)
    assert [window((4,), split, Mesh.of(tp=4), rank).ranges[0] for rank in range(4)] == [(0, 1), (0, 1), (1, 3), (1, 3)]
    assert layout_text(split) == "Split(0, 'tp', sizes=(1, 3), copies=2)"
    with pytest.raises(ValueError, match="copies=0 of a split: expected at least 1"):
        Split(0, "tp", copies=0)


def test_what_a_candidate_leaves_out_of_a_layout() -> None:
    assert with_each(Whole(), ("dp",)) == (Each(("dp",)),)
    assert with_each(Split(0, "tp"), ()) == (Each(()), Split(0, "tp"))
    said = (Each(("dp", "pp")), Partial("tp"))
    assert with_each(said, ("dp",)) == said
    with pytest.raises(ValueError, match="axis 'dp' is used twice"):
        with_each(Partial("dp"), ("dp", "cp"))


def test_a_layout_reads_as_it_is_written() -> None:
    said = with_each((Partial(("tp", "cp")), Split(0, "ep", rule="chunk")), ("dp",))
    assert layout_text(said) == "Each(('dp',)) and Partial(('tp', 'cp')) and Split(0, 'ep', rule='chunk')"
    assert layout_text(with_each(Whole(), ())) == "Whole()"


def test_partial_and_absent_axes_hold_the_whole() -> None:
    for layout in (Whole(), Partial("tp"), Partial(("tp", "dp")), Split(0, "pp"), ()):
        for rank in range(6):
            assert window((4, 5), layout, TP_DP, rank).ranges == ((0, 4), (0, 5))
    assert partial_axes((Split(0, "pp"), Partial(("tp", "dp")), Partial("cp"))) == ("tp", "dp", "cp")
    assert partial_axes(Split(0, "tp")) == ()


def test_placements_are_each_first_and_no_whole() -> None:
    split, each = Split(0, "tp"), Each("dp")
    assert placements((Whole(), split, each)) == (each, split)
    assert placements(split) == (split,)
    assert placements(Whole()) == ()


@pytest.mark.parametrize(
    ("shape", "layout", "message"),
    [
        ((4, 5), Split(2, "tp"), "cuts dimension 2 of a tensor of shape (4, 5)"),
        ((4, 5), Split(-3, "tp"), "cuts dimension -3 of a tensor of shape (4, 5)"),
        ((), Split(0, "tp"), "cuts dimension 0 of a tensor of shape ()"),
        ((4,), Split(0, "tp", sizes=(4,)), "the sizes must be 2 lengths that add up to 4"),
        ((4,), Split(0, "tp", sizes=(1, 2)), "the sizes must be 2 lengths that add up to 4"),
        ((4,), Split(0, "tp", sizes=(2, 2), copies=2), "the sizes must be 1 lengths that add up to 4"),
        ((4,), Split(0, "dp", copies=2), "copies=2): the number of ranks, 3, must be a multiple of copies"),
        ((4,), Split(0, "tp", sizes=(5, -1)), "the sizes must be 2 lengths that add up to 4"),
        ((4,), Each("dp"), "needs a first dimension of 3, but the shape is (4,)"),
        ((), Each("dp"), "needs a first dimension of 3, but the shape is ()"),
        ((4,), Split(0, "xp"), "unknown mesh axis 'xp'"),
        ((4,), Each("xp"), "unknown mesh axis 'xp'"),
        ((4, 4), (Split(0, "tp"), Split(1, "tp")), "axis 'tp' is used twice"),
        ((4, 4), (Split(0, ("dp", "tp")), Partial("tp")), "axis 'tp' is used twice"),
        ((3, 4), (Split(0, "tp"), Each(("dp", "tp"))), "axis 'tp' is used twice"),
    ],
)
def test_what_does_not_fit_is_refused(shape: tuple[int, ...], layout: Layout, message: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        window(shape, layout, TP_DP, 0)
    assert message in str(caught.value)


@pytest.mark.parametrize("layout", ["tp", 0, None, (Split(0, "tp"), "dp"), ((Whole(),),)])
def test_what_is_no_layout_is_refused(layout: Any) -> None:
    with pytest.raises(TypeError, match=r"is not a layout: use Split\(dim, axis\)"):
        placements(layout)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ((Split(0, "pp", (4, 0)), Split(0, "tp")), "all on pp=0 and Split(0, 'tp')"),
        ((Split(0, "pp", (0, 4)),), "all on pp=1"),
        ((Split(0, "pp", (1,)),), "Whole()"),
        ((Split(0, "pp", (1,)), Split(0, "tp")), "Split(0, 'tp')"),
        (Split(0, "tp", (1, 3)), "Split(0, 'tp', sizes=(1, 3))"),
        (Whole(), "Whole()"),
    ],
)
def test_what_lies_on_one_coordinate_is_said_so(layout: Layout, words: str) -> None:
    assert layout_in_words(layout) == words
