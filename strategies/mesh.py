"""Draws meshes: any axes, sizes and order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import strategies as st

from reference.mesh import Mesh, MeshCase
from strategies.scope import Scope

#: Up to here the ranks are processes, and there are few sizes to choose from.
_FEW = 64


@st.composite
def meshes(draw: st.DrawFn, axes: tuple[str, ...], max_world: int, first: str | None = None, most: int = 3) -> Mesh:
    """A mesh of at most ``max_world`` ranks over some of the axes, in any order.

    ``first`` names an axis that is always in it, and that gets its size before the others share what is left; at most
    ``most`` others are named.
    """
    others = [axis for axis in axes if axis != first]
    room = max_world
    sizes: list[tuple[str, int]] = []

    def add(axis: str) -> None:
        nonlocal room
        # Twos more often than the rest, so that there is room for a second and a third axis.
        size = draw(st.sampled_from([*range(1, room + 1), *[2] * (room // 2)]) if room < _FEW else st.integers(1, room))
        sizes.insert(draw(st.integers(0, len(sizes))), (axis, size))
        room //= size

    if first is not None:
        add(first)
    # All that belongs to an axis is drawn together, and from the same choices, so that shrinking can leave it out.
    for _ in range(min(most, len(others))):
        if draw(st.integers(0, 3)) == 0:
            break
        # An axis of one rank changes names and orders only, and every new mesh costs its groups: now and then will do.
        if room == 1 and draw(st.integers(0, 3)) < 3:
            break
        at = draw(st.integers(0, len(others) - 1))
        add(next(axis for axis in others[at:] + others[:at] if axis not in dict(sizes)))
    return Mesh(tuple(sizes))


def smaller_meshes(mesh: Mesh, keep: str | None = None) -> Iterator[Mesh]:
    """Simpler meshes, from the smallest world up: axes left out, sizes 1 and 2. ``keep`` names an axis that stays."""
    choices = [[(name, n) for n in _sizes(size, name == keep)] for name, size in mesh.axes]
    found = {Mesh(tuple((name, n) for name, n in pairs if n > 0)) for pairs in itertools.product(*choices)}
    yield from sorted((m for m in found if _measure(m) < _measure(mesh)), key=_measure)


def _sizes(size: int, stays: bool) -> list[int]:
    """0 leaves the axis out."""
    return [n for n in (0, 1, 2, size) if n <= size and (n > 0 or not stays)]


def _measure(mesh: Mesh) -> tuple[int, int, tuple[tuple[str, int], ...]]:
    return mesh.size, len(mesh.axes), mesh.axes


def simpler(case: MeshCase, scope: Scope) -> Iterator[MeshCase]:
    """Simpler cases of the same kind."""
    for mesh in smaller_meshes(case.mesh):
        yield MeshCase(mesh, case.live)


def cases(scope: Scope) -> st.SearchStrategy[MeshCase]:
    """Live meshes within the world limit where the candidate makes groups, and pure ones of up to
    ``largest_mesh`` ranks where it computes them."""
    kinds: list[st.SearchStrategy[MeshCase]] = []
    if "group" in scope.parts:
        kinds.append(st.builds(MeshCase, meshes(scope.axes, scope.max_world), st.just(True)))
    if "group_ranks" in scope.parts:
        small = meshes(scope.axes, min(64, scope.largest_mesh), most=len(scope.axes))
        large = meshes(scope.axes, scope.largest_mesh, most=len(scope.axes))
        kinds.append(st.builds(MeshCase, small | large, st.just(False)))
    return st.one_of(kinds)
