"""Draws linear layers: kind, mesh, sizes, options and data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from reference.linear import Kind, LinearCase, LinearRecipes
from strategies.layers import BACKWARD, LARGEST, cut_length, divisible, leadings, one_in, tiny
from strategies.mesh import meshes, smaller_meshes
from strategies.recipe import recipes
from strategies.scope import Scope
from strategies.simpler import Simpler

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

KINDS: tuple[Kind, ...] = ("column", "row")

#: The options of a case at their plainest.
#: Features that shrinking tries in every combination.
_TINY = 4


@st.composite
def cases(draw: st.DrawFn, scope: Scope) -> LinearCase:
    """A linear case within the scope. The plainest one is a column layer of one element on one rank."""
    kinds: list[Kind] = [kind for kind in KINDS if f"{kind}_linear" in scope.parts]
    kind = draw(st.sampled_from(kinds))
    explicit = scope.has("explicit_group") and draw(st.booleans())
    axis = draw(st.sampled_from(scope.axes)) if explicit else "tp"
    mesh = draw(meshes(scope.axes, scope.max_world, first=axis))
    n = mesh.axis_size(axis)

    sequence_parallel = scope.has("sequence_parallel") and one_in(draw, 4)
    gather = kind == "column" and not sequence_parallel and scope.has("gather_output") and draw(st.booleans())
    splits = kind == "row" and not sequence_parallel and scope.has("input_not_parallel") and draw(st.booleans())
    bias = draw(st.booleans())
    dims = draw(st.sampled_from([*sorted(scope.token_dims), min(scope.token_dims)]))
    cut, free = cut_length(draw, n, scope.has("uneven")), draw(st.integers(1, LARGEST))
    if one_in(draw, 6):
        free = max(1, cut // n)  # a square shard of the weight, whose transposition no shape gives away
    first = cut_length(draw, n, scope.has("uneven_sequence") or not sequence_parallel)
    leading = draw(leadings(dims, first))
    if sequence_parallel and not scope.has("uneven_sequence"):
        leading = divisible(leading, n)
    dtype = draw(st.sampled_from(scope.dtypes))
    return LinearCase(
        mesh=mesh,
        kind=kind,
        in_features=cut if kind == "row" else free,
        out_features=free if kind == "row" else cut,
        leading=leading,
        axis=axis,
        dtype=dtype,
        bias=bias,
        skip_bias_add=bias and scope.has("skip_bias_add") and one_in(draw, 4),
        gather_output=gather,
        input_is_parallel=not splits,
        sequence_parallel=sequence_parallel,
        explicit_group=explicit,
        input_requires_grad=not one_in(draw, 5),
        weight_requires_grad=not one_in(draw, 5),
        bias_requires_grad=not (bias and one_in(draw, 5)),
        main_grad=scope.has("main_grad") and one_in(draw, 5),
        weight_at_call=scope.has(f"{kind}_weight_at_call") and one_in(draw, 4),
        transposed=draw(st.sampled_from([False, True, True])),
        backward=draw(st.sampled_from(BACKWARD)),
        init=scope.checks_initialization and one_in(draw, 4),
        recipes=LinearRecipes(*draw(recipes(4, dtype))),
    )


def simpler(case: LinearCase, scope: Scope) -> Iterator[LinearCase]:
    """Simpler cases within the scope: first the smallest meshes and sizes with the same options, all combinations of
    them, then one option or recipe at a time as plain as can be."""
    meshes_ = [*smaller_meshes(case.mesh, keep=case.axis), case.mesh]
    sizes = sorted(itertools.product(range(1, _TINY + 1), repeat=2), key=lambda pair: (sum(pair), pair))
    for mesh, (inside, outside), leading in itertools.product(meshes_, sizes, tiny(case.leading)):
        changes = {"mesh": mesh, "in_features": inside, "out_features": outside, "leading": leading}
        yield from _SIMPLER.changed(case, scope, **changes)
    yield from _SIMPLER.plainer(case, scope)


def _measure(case: LinearCase) -> tuple[Any, ...]:
    """What is simpler has the smaller measure."""
    options, made = len(_SIMPLER.options(case)), len(_SIMPLER.recipes(case))
    tokens = sum(math.prod(dims) for dims in case.leading)
    mesh = case.mesh.size, len(case.mesh.axes)
    return (*mesh, case.in_features + case.out_features, case.in_features, len(case.leading), tokens, options, made)


def within(case: LinearCase, scope: Scope) -> bool:
    """Whether the dtype and the sizes of a case are such as the scope allows."""
    n = case.parallel_size
    cut = case.in_features if case.kind == "row" else case.out_features
    sequence = not case.sequence_parallel or all(dims[0] % n == 0 for dims in case.leading)
    sizes = (cut % n == 0 or scope.has("uneven")) and (sequence or scope.has("uneven_sequence"))
    return sizes and case.dtype in scope.dtypes


_SIMPLER = Simpler(LinearCase, ("leading", "axis"), _measure, within)
