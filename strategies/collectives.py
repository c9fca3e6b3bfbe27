"""Draws differentiable collectives: kind, mesh, shapes, dimension and data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from reference.collectives import KINDS, CollectivesCase, CollectivesRecipes
from strategies.layers import BACKWARD, MOST_MICRO_BATCHES, alike, cut_length, one_in
from strategies.mesh import meshes, smaller_meshes
from strategies.recipe import recipes
from strategies.scope import Scope
from strategies.simpler import Simpler

#: The optional features of the subject.
FEATURES = {
    "collectives_any_dim": "any dimension is cut, and not only the last (scatter, gather) and the first (sequence)",
    "collectives_uneven": "dimensions that the group size does not divide, also fewer than ranks",
    "collectives_any_axis": "along any axis of the mesh, and not only tp",
}

_MOST_DIMS = 4


@st.composite
def cases(draw: st.DrawFn, scope: Scope) -> CollectivesCase:
    """A collective within the scope. The plainest one copies one element on one rank."""
    kind = draw(st.sampled_from(KINDS))
    several = scope.has("collectives_any_axis") and draw(st.booleans())
    axis = draw(st.sampled_from(scope.axes)) if several else scope.usual("tp")
    mesh = draw(meshes(scope.axes, scope.max_world, first=axis))
    n, sequence = mesh.axis_size(axis), kind in ("gather_sequence", "reduce_scatter")
    dims = draw(st.integers(1, _MOST_DIMS))
    dim = -draw(st.integers(1, dims)) if scope.has("collectives_any_dim") else -dims if sequence else -1
    shapes = []
    for _ in range(draw(st.integers(1, MOST_MICRO_BATCHES))):
        shape = [draw(st.integers(1, 3)) for _ in range(dims)]
        shape[dim] = cut_length(draw, n, scope.has("collectives_uneven"))
        shapes.append(tuple(shape))
    dtype = draw(st.sampled_from(scope.dtypes))
    return CollectivesCase(
        mesh=mesh,
        kind=kind,
        shapes=alike(draw, shapes),
        dim=dim,
        axis=axis,
        dtype=dtype,
        input_requires_grad=not one_in(draw, 6),
        transposed=draw(st.sampled_from([False, True, True])),
        backward=draw(st.sampled_from(BACKWARD)),
        recipes=CollectivesRecipes(*draw(recipes(2, dtype))),
    )


def simpler(case: CollectivesCase, scope: Scope) -> Iterator[CollectivesCase]:
    """Simpler cases within the scope: the smallest meshes and shapes, then one option or recipe at a time."""
    for mesh in [*smaller_meshes(case.mesh, keep=case.axis), case.mesh]:
        for shape, dim in _tiny(case):
            yield from _SIMPLER.changed(case, scope, mesh=mesh, shapes=(shape,), dim=dim)
        yield from _SIMPLER.changed(case, scope, mesh=mesh, shapes=case.shapes[:1])
    yield from _SIMPLER.plainer(case, scope)


def _tiny(case: CollectivesCase) -> Iterator[tuple[tuple[int, ...], int]]:
    """Shapes of at most four elements; the dimension stays the first or the last where it is."""
    for shape in ((1,), (2,), (3,), (4,), (1, 2), (2, 1), (2, 2)):
        for dim in {-1, -len(shape)}:
            yield shape, dim


def _measure(case: CollectivesCase) -> tuple[Any, ...]:
    """What is simpler has the smaller measure."""
    options, made = len(_SIMPLER.options(case)), len(_SIMPLER.recipes(case))
    elements = sum(math.prod(shape) for shape in case.shapes)
    sizes = len(case.shapes), elements, len(case.shapes[0]), case.shapes, -case.dim
    return (case.mesh.size, len(case.mesh.axes), *sizes, options, made)


def within(case: CollectivesCase, scope: Scope) -> bool:
    """Whether the dtype, the dimension and the sizes of a case are such as the scope allows."""
    sequence = case.kind in ("gather_sequence", "reduce_scatter")
    dims = {len(shape) for shape in case.shapes}
    usual = {-n if sequence else -1 for n in dims} == {case.dim}
    even = all(shape[case.dim] % case.parallel_size == 0 for shape in case.shapes)
    return (
        case.dtype in scope.dtypes
        and (usual or scope.has("collectives_any_dim"))
        and (even or scope.has("collectives_uneven"))
    )


_SIMPLER = Simpler(CollectivesCase, ("shapes", "dim", "axis"), _measure, within)
