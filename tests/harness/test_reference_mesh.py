"""Mesh arithmetic against a plain enumeration of all coordinates."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from drawing import small_meshes
from hypothesis import given
from hypothesis import strategies as st

from reference.mesh import AXES, COMBINED_AXES, Mesh, as_lists, expected_groups

several_axes = st.lists(st.sampled_from(AXES), min_size=1, unique=True).map(tuple)
MILLION = Mesh.of(tp=8, cp=5, ep=2, dp=125, pp=100)


def enumerated(mesh: Mesh) -> list[dict[str, int]]:
    """The coordinates of every rank, in order: the first axis varies fastest, so it is the last of the product."""
    names = [name for name, _ in reversed(mesh.axes)]
    every = itertools.product(*(range(size) for _, size in reversed(mesh.axes)))
    return [dict(zip(names, at, strict=True)) for at in every]


def enumerated_groups(mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    """Ranks that agree on every other axis."""
    by_rest: dict[tuple[int, ...], list[int]] = {}
    for rank, at in enumerate(enumerated(mesh)):
        by_rest.setdefault(tuple(at[name] for name in mesh.names if name not in axes), []).append(rank)
    return sorted(by_rest.values())


@given(small_meshes)
def test_coordinates_and_rank_are_inverse(mesh: Mesh) -> None:
    wanted = enumerated(mesh)
    assert mesh.size == len(wanted)
    at = mesh.coordinates()
    assert {name: list(values) for name, values in at.items()} == {
        name: [w[name] for w in wanted] for name in mesh.names
    }
    if mesh.axes:
        assert mesh.rank_at(at).tolist() == list(range(mesh.size))
    for rank, coordinates in enumerate(wanted):
        assert {name: int(c) for name, c in mesh.coordinates(rank).items()} == coordinates
        assert int(mesh.rank_at(coordinates)) == rank
        assert int(mesh.rank_at({name: c for name, c in coordinates.items() if c})) == rank


@given(small_meshes, several_axes)
def test_groups_partition_the_world(mesh: Mesh, axes: tuple[str, ...]) -> None:
    groups = mesh.groups(axes)
    assert groups.tolist() == enumerated_groups(mesh, axes)
    assert sorted(groups.ravel().tolist()) == list(range(mesh.size))
    assert groups.shape[1] == mesh.axis_size(axes)
    assert np.array_equal(groups, mesh.groups(axes[::-1])), "the order of the names must not matter"
    assert np.array_equal(groups, mesh.groups(axes + axes)), "nor must a repeated name"


@given(small_meshes, several_axes)
def test_the_coordinate_is_the_position_in_the_group(mesh: Mesh, axes: tuple[str, ...]) -> None:
    for rank in range(mesh.size):
        group = mesh.group_of(rank, axes)
        assert list(group) in enumerated_groups(mesh, axes)
        assert group[mesh.coordinate(rank, axes)] == rank


@given(small_meshes)
def test_groups_of_two_axes_meet_in_at_most_one_rank(mesh: Mesh) -> None:
    for one, other in itertools.combinations(AXES, 2):
        for a, b in itertools.product(as_lists(mesh.groups(one)), as_lists(mesh.groups(other))):
            assert len(set(a) & set(b)) <= 1


@given(small_meshes)
def test_embedding_groups_are_the_first_and_last_stage(mesh: Mesh) -> None:
    stages = enumerated_groups(mesh, ("pp",))
    assert mesh.embedding_groups().tolist() == [sorted({s[0], s[-1]}) for s in stages]
    assert mesh.position_embedding_groups().tolist() == [[s[0]] for s in stages]


@given(small_meshes)
def test_neighbours_are_the_stages_before_and_after(mesh: Mesh) -> None:
    previous, following = mesh.neighbours()
    assert previous.shape == following.shape == (mesh.size,)
    for stages in enumerated_groups(mesh, ("pp",)):
        for i, rank in enumerate(stages):
            assert previous[rank] == stages[i - 1]
            assert following[rank] == stages[(i + 1) % len(stages)]


@given(st.integers(1, 6), st.integers(1, 4))
def test_chunks_are_dealt_to_the_stages_in_turn(stages: int, virtual: int) -> None:
    mesh = Mesh.of(tp=2, pp=stages)
    dealt = [mesh.chunk(stage, v) for v in range(virtual) for stage in range(stages)]
    assert dealt == list(range(stages * virtual))


@given(small_meshes)
def test_expected_groups_are_those_of_every_axis_and_combination(mesh: Mesh) -> None:
    groups = {axes: as_lists(ranks) for axes, ranks in expected_groups(mesh).items()}
    assert groups.pop(("embedding",)) == mesh.embedding_groups().tolist()
    assert groups.pop(("position-embedding",)) == mesh.position_embedding_groups().tolist()
    names = [(axis,) for axis in AXES] + list(COMBINED_AXES.values())
    assert groups == {axes: enumerated_groups(mesh, axes) for axes in names}


@given(small_meshes)
def test_a_mesh_is_read_as_it_is_written(mesh: Mesh) -> None:
    text = ",".join(f"{name}={size}" for name, size in mesh.axes)
    assert Mesh.parse(text) == mesh
    assert Mesh.parse(text.replace(",", " , ").replace("=", " = ")) == mesh
    assert str(mesh) == (text or "one rank")
    assert Mesh.of(mesh.size, order="-".join(mesh.names) or None, **dict(mesh.axes)) == mesh
    assert Mesh.parse(text, order="-".join(reversed(AXES))).names == tuple(reversed(AXES))


def test_the_order_of_axes() -> None:
    assert Mesh.of(dp=3, tp=2).axes == (("tp", 2), ("dp", 3)), "the default order"
    assert Mesh.of(order="dp-tp", tp=2, dp=3).axes == (("dp", 3), ("tp", 2))
    assert Mesh.of(order="dp-pp", dp=3, tp=1).axes == (("dp", 3), ("pp", 1), ("tp", 1))
    assert Mesh.of(tp=2, dp=3).groups("tp").tolist() == [[0, 1], [2, 3], [4, 5]]
    assert Mesh.of(order="dp-tp", tp=2, dp=3).groups("tp").tolist() == [[0, 3], [1, 4], [2, 5]]
    assert Mesh.of().size == 1


def test_a_rank_is_described_by_its_coordinates_above_one() -> None:
    mesh = Mesh.of(tp=2, cp=1, dp=3)
    assert mesh.describe(3) == "rank 3 (tp=1, dp=1)"
    assert Mesh.of(tp=1).describe(0) == "rank 0"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh((("xp", 2),)), "unknown mesh axis 'xp': expected one of tp, cp, ep, dp, pp"),
        (lambda: Mesh.of(xp=2), "unknown mesh axis 'xp'"),
        (lambda: Mesh.of(order="tp-xp", tp=2), "unknown mesh axis 'xp'"),
        (lambda: Mesh((("tp", 2), ("tp", 2))), "mesh axis 'tp' is given twice: name each axis once"),
        (lambda: Mesh.parse("tp=2,tp=2"), "mesh axis 'tp' is given twice"),
        (lambda: Mesh.of(order="tp-tp", tp=2), "mesh axis 'tp' is given twice"),
        (lambda: Mesh.of(tp=0), "mesh axis 'tp' has size 0: expected a whole number of at least 1"),
        (lambda: Mesh.parse("dp=-3"), "mesh axis 'dp' has size -3"),
        (lambda: Mesh((("tp", True),)), "mesh axis 'tp' has size True"),
        (lambda: Mesh((("tp", 2.0),)), "mesh axis 'tp' has size 2.0"),  # type: ignore[arg-type]
        (lambda: Mesh.of(order="tp-pp", tp=2, dp=3), "order 'tp-pp' leaves out axis 'dp' of size 3: name it"),
        (lambda: Mesh.parse("tp=2,dp=3", order="tp"), "order 'tp' leaves out axis 'dp' of size 3"),
        (lambda: Mesh.of(8, tp=2, dp=3), "(tp=2 x dp=3) multiply to 6, but the world has 8 ranks: change"),
        (lambda: Mesh().require_world(2), "(no axis) multiply to 1, but the world has 2 ranks"),
        (lambda: Mesh.parse("tp"), "cannot read 'tp' as an axis: write AXIS=SIZE, for example tp=2,dp=3"),
        (lambda: Mesh.parse("tp="), "cannot read 'tp='"),
        (lambda: Mesh.parse("tp=two"), "cannot read 'tp=two'"),
        (lambda: Mesh.parse("tp=--2"), "cannot read 'tp=--2'"),
        (lambda: Mesh.parse("tp=²"), "cannot read 'tp=²'"),
        (lambda: Mesh.parse("tp=" + "9" * 5000), "cannot read 'tp=999"),
        (lambda: Mesh.of(tp=2).groups("xp"), "unknown mesh axis 'xp'"),
        (lambda: Mesh.of(tp=2).axis_size("xp"), "unknown mesh axis 'xp'"),
        (lambda: Mesh.of(tp=2).coordinate(0, ("tp", "xp")), "unknown mesh axis 'xp'"),
        (lambda: Mesh.of(tp=2).coordinate(-1, "tp"), "rank -1 is outside the mesh of 2 ranks"),
        (lambda: Mesh.of(tp=2).coordinates(2), "rank 2 is outside the mesh of 2 ranks"),
        (lambda: Mesh.of(tp=2).coordinates(np.array([0, -1, 1])), "rank -1 is outside the mesh of 2 ranks"),
        (lambda: Mesh.of(tp=2).group_of(2, "tp"), "rank 2 is outside the mesh of 2 ranks"),
    ],
)
def test_what_is_invalid_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        make()
    assert message in str(caught.value)


def test_a_million_ranks() -> None:
    assert MILLION.size == 10**6
    every = np.arange(10**6)
    for axes, groups in expected_groups(MILLION).items():
        if axes[0].endswith("embedding"):
            continue
        assert groups.shape == (10**6 // MILLION.axis_size(axes), MILLION.axis_size(axes))
        assert np.array_equal(np.sort(groups, axis=None), every)
    assert np.array_equal(MILLION.rank_at(MILLION.coordinates()), every)
    stride = 8 * 5 * 2
    assert MILLION.groups("dp")[81].tolist() == [stride * 125 + 1 + stride * i for i in range(125)]
    assert np.array_equal(MILLION.neighbours()[1], (every + 10**4) % 10**6)
    assert np.array_equal(MILLION.embedding_groups(), np.stack([every[: 10**4], every[-(10**4) :]], axis=1))
