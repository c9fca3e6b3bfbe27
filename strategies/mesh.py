"""Draws meshes: any axes, sizes and order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import strategies as st

from reference.mesh import Mesh, MeshCase
from strategies.scope import Scope

LARGEST_PURE_WORLD = 10**6


@st.composite
def meshes(draw: st.DrawFn, axes: tuple[str, ...], max_world: int, first: str | None = None, most: int = 3) -> Mesh:
    """A mesh of at most ``max_world`` ranks over some of the axes, in any order.

    ``first`` names an axis that is always in it, and that gets its size before the others share what is left; at most
    ``most`` others are named.
    """
    others = [axis for axis in axes if axis != first]
    named = draw(st.lists(st.sampled_from(others), unique=True, max_size=most)) if others else []
    room, sizes = max_world, []
    for axis in ([first] if first is not None else []) + named:
        # The axis that a subject is about: more often cut than not.
        more = [2] if axis == first and room > 1 else []
        size = draw(st.sampled_from([*range(1, room + 1), *more]) if more else st.integers(1, room))
        sizes.append((axis, size))
        room //= size
    order = draw(st.permutations(range(len(sizes)))) if len(sizes) > 1 else range(len(sizes))
    return Mesh(tuple(sizes[i] for i in order))


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
    """Live meshes within the world limit where the candidate makes groups, and pure ones of up to 10^6 ranks where it
    computes them."""
    kinds: list[st.SearchStrategy[MeshCase]] = []
    if "group" in scope.parts:
        kinds.append(st.builds(MeshCase, meshes(scope.axes, scope.max_world), st.just(True)))
    if "group_ranks" in scope.parts:
        small = meshes(scope.axes, 64, most=len(scope.axes))
        large = meshes(scope.axes, LARGEST_PURE_WORLD, most=len(scope.axes))
        kinds.append(st.builds(MeshCase, small | large, st.just(False)))
    return st.one_of(kinds)
