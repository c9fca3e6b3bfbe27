"""Draws reductions: operation, algorithm, mesh, lengths, options and data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, get_args

from hypothesis import strategies as st

from reference.all_reduce import Algorithm, AllReduceCase, AllReduceRecipes, Invalid, Operation, Reduction
from reference.recipe import Recipe
from strategies.layers import alike, one_in
from strategies.mesh import meshes, smaller_meshes
from strategies.recipe import recipes
from strategies.scope import Scope
from strategies.simpler import Simpler

#: The optional features of the subject.
FEATURES = {
    "all_reduce_library": "reduces by one collective of a library; the default where no algorithm is named",
    "all_reduce_ring": "reduces by a ring of point-to-point sends",
    "all_reduce_halving_doubling": "reduces by recursive halving and doubling",
    "all_reduce_tree": "reduces along a binomial tree",
    "all_reduce_parameter_server": "reduces on one rank that all push to and pull from",
    "all_reduce_pieces": "has the reduce-scatter and the all-gather on their own (library and ring)",
    "all_reduce_uneven_pieces": "and of lengths that the group size does not divide, also fewer than ranks",
    "all_reduce_average": "has the mean, beside the sum",
    "all_reduce_extremes": "has the maximum and the minimum",
    "all_reduce_propagates_nan": "a NaN of any rank is the maximum and the minimum",
    "all_reduce_fp32_accumulation": "can keep sums of bf16 and fp16 in fp32",
    "all_reduce_any_strides": "takes tensors that are not contiguous",
    "all_reduce_in_place": "can write the results into its inputs",
    "all_reduce_handles": "can begin several, and wait for them in any order",
    "all_reduce_empty": "takes tensors without elements",
    "all_reduce_refuses": "refuses, on every rank, what differs between ranks or cannot be reduced, unless unchecked",
    "all_reduce_any_axis": "along any axis of the mesh, and not only tp",
}

_ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
_MOST_TENSORS = 3
_LONGEST = 24
Shape = tuple[int, ...]


@st.composite
def cases(draw: st.DrawFn, scope: Scope) -> AllReduceCase:
    """A reduction within the scope. The plainest one sums one element on one rank."""
    several = scope.has("all_reduce_any_axis") and draw(st.booleans())
    axis = draw(st.sampled_from(scope.axes)) if several else scope.usual("tp")
    mesh = draw(meshes(scope.axes, scope.max_world, first=axis))
    n = mesh.axis_size(axis)
    algorithm = draw(st.sampled_from(algorithms(scope)))
    pieces = scope.has("all_reduce_pieces") and algorithm in ("library", "ring") and one_in(draw, 3)
    operation: Operation = draw(st.sampled_from(["reduce_scatter", "all_gather"])) if pieces else "all_reduce"
    reduces = operation != "all_gather"
    whole = not pieces or scope.has("all_reduce_uneven_pieces")
    shapes = alike(draw, draw(st.lists(_shapes(n, whole, scope), min_size=1, max_size=_MOST_TENSORS)))
    reduction: Reduction = draw(st.sampled_from(_reductions(scope))) if reduces else "sum"
    dtype = draw(st.sampled_from(scope.dtypes))
    refuses = scope.has("all_reduce_refuses") and not pieces and n > 1
    check = not (scope.has("all_reduce_refuses") and one_in(draw, 4))
    handles = scope.has("all_reduce_handles") and not pieces and one_in(draw, 3)
    invalid: Invalid = ""
    if refuses and check and one_in(draw, 8):
        invalid = draw(st.sampled_from(_invalid(shapes, handles)))
    (recipe,) = draw(recipes(1, dtype))
    if reduction in ("max", "min") and recipe.inject == "nan" and not scope.has("all_reduce_propagates_nan"):
        recipe = dataclasses.replace(recipe, inject="inf")
    wide = scope.has("all_reduce_fp32_accumulation") and reduces
    return AllReduceCase(
        mesh=mesh,
        operation=operation,
        algorithm=algorithm,
        reduction=reduction,
        shapes=shapes,
        axis=axis,
        dtype=dtype,
        accumulate_fp32=wide and draw(st.booleans()),
        transposed=scope.has("all_reduce_any_strides") and draw(st.sampled_from([False, True, True])),
        in_place=scope.has("all_reduce_in_place") and not pieces and draw(st.booleans()),
        calls="handles" if handles else "together",
        check=check,
        late=one_in(draw, 3),
        invalid=invalid,
        recipes=AllReduceRecipes(recipe),
    )


def algorithms(scope: Scope) -> list[Algorithm]:
    """Those that the scope names; one that names none has the library's."""
    return [name for name in _ALGORITHMS if scope.has(f"all_reduce_{name}")] or ["library"]


def _reductions(scope: Scope) -> list[Reduction]:
    found: list[Reduction] = ["sum", "sum"]
    if scope.has("all_reduce_average"):
        found += ["avg", "avg"]
    if scope.has("all_reduce_extremes"):
        found += ["max", "min"]
    return found


def _invalid(shapes: tuple[Shape, ...], handles: bool) -> list[Invalid]:
    kinds: list[Invalid] = ["length", "dtype", "reduction", "integers"]
    if not handles:
        kinds.append("number")
    return [*kinds, "order"] if len({math.prod(shape) for shape in shapes}) > 1 else kinds


@st.composite
def _shapes(draw: st.DrawFn, n: int, any_length: bool, scope: Scope) -> Shape:
    """One, two or three dimensions; without elements now and then; often fewer than ranks, or one more or less than a
    multiple."""
    if not any_length:
        return (n * draw(st.integers(1, 4)),)
    least = 0 if scope.has("all_reduce_empty") else 1
    if draw(st.booleans()):
        length = draw(st.integers(least, max(_LONGEST, n)))
        return (length,)
    return tuple(draw(st.lists(st.integers(least, 4), min_size=2, max_size=3)))


def simpler(case: AllReduceCase, scope: Scope) -> Iterator[AllReduceCase]:
    """Simpler cases within the scope: the smallest meshes and shapes, then one option or recipe at a time."""
    for mesh in [*smaller_meshes(case.mesh, keep=case.axis), case.mesh]:
        for shapes in _tiny(mesh.axis_size(case.axis)):
            yield from _SIMPLER.changed(case, scope, mesh=mesh, shapes=shapes)
        yield from _SIMPLER.changed(case, scope, mesh=mesh, shapes=case.shapes[:1])
        yield from _SIMPLER.changed(case, scope, mesh=mesh)
    yield from _SIMPLER.plainer(case, scope)
    yield from _SIMPLER.changed(case, scope, algorithm="ring")
    plain_data = dataclasses.replace(case.recipes.input, seed=0, inject=None, at=0)
    yield from _SIMPLER.changed(case, scope, recipes=AllReduceRecipes(plain_data))


def _tiny(n: int) -> list[tuple[Shape, ...]]:
    one: list[Shape] = [(1,), (2,), (3,), (n,), (n + 1,), (2, 2)]
    return [*((shape,) for shape in one), ((1,), (1,)), ((1,), (2,)), ((2,), (2,))]


def _measure(case: AllReduceCase) -> tuple[Any, ...]:
    """What is simpler has the smaller measure."""
    options = len(_SIMPLER.options(case))
    recipe = case.recipes.input
    data = recipe != Recipe(), recipe.inject is not None, recipe.seed, recipe.at
    sizes = len(case.shapes), sum(case.lengths), max(map(len, case.shapes)), case.shapes
    return (case.mesh.size, len(case.mesh.axes), *sizes, options, _ALGORITHMS.index(case.algorithm), *data)


def within(case: AllReduceCase, scope: Scope) -> bool:
    """Whether the dtype and all options of a case are such as the scope allows."""
    pieces = case.operation != "all_reduce"
    even = all(length and length % case.parallel_size == 0 for length in case.lengths)
    nan = case.reduction in ("max", "min") and case.recipes.input.inject == "nan"
    needs = {
        "all_reduce_pieces": pieces,
        "all_reduce_uneven_pieces": pieces and not even,
        "all_reduce_average": case.reduction == "avg",
        "all_reduce_extremes": case.reduction in ("max", "min"),
        "all_reduce_propagates_nan": nan,
        "all_reduce_fp32_accumulation": case.accumulate_fp32,
        "all_reduce_any_strides": case.transposed,
        "all_reduce_in_place": case.in_place,
        "all_reduce_handles": case.calls == "handles",
        "all_reduce_empty": 0 in case.lengths,
        "all_reduce_refuses": bool(case.invalid) or not case.check,
        "all_reduce_any_axis": case.axis != scope.usual("tp"),
    }
    return (
        case.dtype in scope.dtypes
        and case.algorithm in algorithms(scope)
        and all(scope.has(feature) for feature, needed in needs.items() if needed)
    )


_SIMPLER = Simpler(AllReduceCase, ("shapes", "axis"), _measure, within)
