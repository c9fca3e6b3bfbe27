"""Draws linear layers: kind, mesh, sizes, options and data."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from reference.linear import LinearCase, LinearRecipes
from reference.recipe import Recipe
from strategies.mesh import meshes, smaller_meshes
from strategies.recipe import exact_recipes
from strategies.scope import Scope

#: The optional features of the subject: a candidate names those that it supports.
FEATURES = {
    "gather_output": "a column layer that gathers its output",
    "input_not_parallel": "a row layer that splits its input itself",
    "skip_bias_add": "returns (output, bias) and leaves the addition to the caller",
    "sequence_parallel": "the first token dimension is cut before a column layer and after a row layer",
    "uneven": "features that the group size does not divide, also fewer than ranks",
    "uneven_sequence": "sequence lengths that the group size does not divide, also fewer than ranks",
    "explicit_group": "the layer is given a process group, along any axis, instead of taking the default",
    "main_grad": "gradients accumulated in fp32 in a buffer beside the parameter",
    "column_weight_at_call": "the weight is passed to the forward of a column layer",
    "row_weight_at_call": "the weight is passed to the forward of a row layer",
}

_LARGEST = 12
#: Features that shrinking tries in every combination.
_TINY = 4


@st.composite
def cases(draw: st.DrawFn, scope: Scope) -> LinearCase:
    """A linear case within the scope. The plainest one is a column layer of one element on one rank."""
    kinds = [kind for kind in ("column", "row") if f"{kind}_linear" in scope.parts]
    kind = draw(st.sampled_from(kinds))
    explicit = scope.has("explicit_group") and draw(st.booleans())
    axis = draw(st.sampled_from(scope.axes)) if explicit else "tp"
    mesh = draw(meshes(scope.axes, scope.max_world, first=axis))
    n = mesh.axis_size(axis)

    sequence_parallel = scope.has("sequence_parallel") and _one_in(draw, 3)
    gather = kind == "column" and not sequence_parallel and scope.has("gather_output") and draw(st.booleans())
    splits = kind == "row" and not sequence_parallel and scope.has("input_not_parallel") and draw(st.booleans())
    bias = draw(st.booleans())
    dims = draw(st.sampled_from([*sorted(scope.token_dims), min(scope.token_dims)]))
    cut, free = _features(draw, n, scope.has("uneven")), draw(st.integers(1, _LARGEST))
    first = _features(draw, n, scope.has("uneven_sequence") or not sequence_parallel)
    leading = draw(st.lists(_tokens(dims, first), min_size=1, max_size=2))
    if sequence_parallel and not scope.has("uneven_sequence"):
        leading = [(max(n, d[0] // n * n), *d[1:]) for d in leading]
    return LinearCase(
        mesh=mesh,
        kind=kind,
        in_features=cut if kind == "row" else free,
        out_features=free if kind == "row" else cut,
        leading=tuple(leading),
        axis=axis,
        dtype=draw(st.sampled_from(scope.dtypes)),
        bias=bias,
        skip_bias_add=bias and scope.has("skip_bias_add") and _one_in(draw, 4),
        gather_output=gather,
        input_is_parallel=not splits,
        sequence_parallel=sequence_parallel,
        explicit_group=explicit,
        input_requires_grad=not _one_in(draw, 5),
        weight_requires_grad=not _one_in(draw, 5),
        bias_requires_grad=not (bias and _one_in(draw, 5)),
        main_grad=scope.has("main_grad") and _one_in(draw, 4),
        weight_at_call=scope.has(f"{kind}_weight_at_call") and _one_in(draw, 4),
        transposed=draw(st.booleans()),
        init=scope.checks_initialization and _one_in(draw, 4),
        recipes=draw(st.builds(LinearRecipes, *[exact_recipes()] * 4)),
    )


def simpler(case: LinearCase, scope: Scope) -> Iterator[LinearCase]:
    """Simpler cases within the scope: first the smallest meshes and sizes with the same options, all combinations of
    them, then one option or recipe at a time as plain as can be."""
    meshes_ = [*smaller_meshes(case.mesh, keep=case.axis), case.mesh]
    sizes = sorted(itertools.product(range(1, _TINY + 1), repeat=2), key=lambda pair: (sum(pair), pair))
    for mesh, (inside, outside), leading in itertools.product(meshes_, sizes, _tiny_tokens(case)):
        changes = {"mesh": mesh, "in_features": inside, "out_features": outside, "leading": leading}
        yield from _if_simpler(case, scope, changes)
    plain = LinearCase(case.mesh, case.kind, case.in_features, case.out_features)
    for f in dataclasses.fields(LinearCase):
        if f.name not in ("mesh", "kind", "in_features", "out_features", "leading", "axis", "recipes"):
            yield from _if_simpler(case, scope, {f.name: getattr(plain, f.name)})
    for f in dataclasses.fields(case.recipes):
        recipes = dataclasses.replace(case.recipes, **{f.name: Recipe()})
        yield from _if_simpler(case, scope, {"recipes": recipes})


def _tiny_tokens(case: LinearCase) -> list[tuple[tuple[int, ...], ...]]:
    """Few tokens, with as many dimensions as the case has."""
    rest = (1,) * (len(case.leading[0]) - 1)
    one, two = ((1, *rest),), ((2, *rest),)
    return [one, two, one + one, case.leading]


def _if_simpler(case: LinearCase, scope: Scope, changes: dict[str, Any]) -> Iterator[LinearCase]:
    try:
        changed = dataclasses.replace(case, **changes)
    except ValueError:
        return  # options that do not go together
    if _measure(changed) < _measure(case) and within(changed, scope):
        yield changed


def _measure(case: LinearCase) -> tuple[Any, ...]:
    """What is simpler has the smaller measure."""
    plain = LinearCase(case.mesh, case.kind, case.in_features, case.out_features)
    options = sum(getattr(case, f.name) != getattr(plain, f.name) for f in dataclasses.fields(case))
    recipes = sum(getattr(case.recipes, f.name) != Recipe() for f in dataclasses.fields(case.recipes))
    tokens = sum(math.prod(dims) for dims in case.leading)
    mesh = case.mesh.size, len(case.mesh.axes)
    return (*mesh, case.in_features + case.out_features, case.in_features, len(case.leading), tokens, options, recipes)


def within(case: LinearCase, scope: Scope) -> bool:
    """Whether the sizes of a case are such as the scope allows."""
    n = case.parallel_size
    cut = case.in_features if case.kind == "row" else case.out_features
    even = cut % n == 0 and (case.kind == "column" or case.input_is_parallel or case.in_features % n == 0)
    sequence = not case.sequence_parallel or all(dims[0] % n == 0 for dims in case.leading)
    return (even or scope.has("uneven")) and (sequence or scope.has("uneven_sequence"))


def _features(draw: st.DrawFn, n: int, uneven: bool) -> int:
    """A length that is cut n ways."""
    if uneven:
        return draw(st.integers(1, _LARGEST))
    return n * draw(st.integers(1, max(1, _LARGEST // n)))


def _tokens(dims: int, first: int) -> st.SearchStrategy[tuple[int, ...]]:
    """The token dimensions of a micro-batch; micro-batches differ in all but their number."""
    rest = [st.integers(1, 3) for _ in range(dims - 1)]
    return st.tuples(st.sampled_from(sorted({first, max(1, first - 1), max(1, first // 2)}, reverse=True)), *rest)


def _one_in(draw: st.DrawFn, n: int) -> bool:
    return draw(st.integers(0, n - 1)) == n - 1
