"""Draws vocabulary-parallel embeddings: mesh, table, tokens, options and data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from reference.embedding import EmbeddingCase, EmbeddingRecipes, Invalid
from reference.ids import IDS, Ids
from strategies.layers import BACKWARD, LARGEST, divisible, leadings, one_in, tiny
from strategies.mesh import meshes, smaller_meshes
from strategies.recipe import recipes
from strategies.scope import Scope
from strategies.simpler import Simpler

#: The optional features of the subject, beside those that it shares with linear.
FEATURES = {
    "embedding_sequence_parallel": "the output of the embedding is cut along the first token dimension",
    "embedding_padding_idx": "a token whose row gets no gradient",
    "embedding_uneven": "tables whose rows the group size does not divide",
    "embedding_refuses_ids": "ids out of range are refused on every rank alike",
    "uneven_sequence": "sequence lengths that the group size does not divide, also fewer than ranks",
    "explicit_group": "the layer is given a process group, along any axis, instead of taking the default",
    "main_grad": "gradients accumulated in fp32 in a buffer beside the parameter",
}

_INVALID: list[Invalid] = ["negative", "past"]
_TINY = 4


@st.composite
def cases(draw: st.DrawFn, scope: Scope) -> EmbeddingCase:
    """An embedding within the scope. The plainest one has one row of one element, on one rank."""
    explicit = scope.has("explicit_group") and draw(st.booleans())
    axis = draw(st.sampled_from(scope.axes)) if explicit else "tp"
    mesh = draw(meshes(scope.axes, scope.max_world, first=axis))
    n = mesh.axis_size(axis)
    vocabulary, hidden = draw(st.integers(n, max(n, LARGEST) + n)), draw(st.integers(1, LARGEST))
    padding = draw(st.integers(0, 3))
    if not scope.has("embedding_uneven"):
        padding += -(vocabulary + padding) % n
    sequence_parallel = scope.has("embedding_sequence_parallel") and one_in(draw, 3)
    dims = draw(st.sampled_from([*sorted(scope.token_dims), min(scope.token_dims)]))
    leading = draw(leadings(dims, draw(st.integers(1, LARGEST))))
    if sequence_parallel and not scope.has("uneven_sequence"):
        leading = divisible(leading, n)
    dtype = draw(st.sampled_from(scope.dtypes))
    padded = scope.has("embedding_padding_idx") and one_in(draw, 3)
    refuses = scope.has("embedding_refuses_ids") and one_in(draw, 10)
    return EmbeddingCase(
        mesh=mesh,
        vocabulary=vocabulary,
        hidden=hidden,
        leading=leading,
        axis=axis,
        dtype=dtype,
        padding=padding,
        padding_idx=draw(st.integers(0, vocabulary - 1)) if padded else None,
        sequence_parallel=sequence_parallel,
        explicit_group=explicit,
        weight_requires_grad=not one_in(draw, 6),
        main_grad=scope.has("main_grad") and one_in(draw, 5),
        transposed=draw(st.sampled_from([False, True, True])),
        backward=draw(st.sampled_from(BACKWARD)),
        invalid=draw(st.sampled_from(_INVALID)) if refuses else "",
        init=scope.checks_initialization and not refuses and one_in(draw, 4),
        ids=Ids(draw(st.sampled_from(list(IDS))), draw(st.integers(0, 99))),
        recipes=EmbeddingRecipes(*draw(recipes(2, dtype))),
    )


def simpler(case: EmbeddingCase, scope: Scope) -> Iterator[EmbeddingCase]:
    """Simpler cases within the scope: first the smallest meshes and sizes with the same options, all combinations of
    them, then one option or recipe at a time as plain as can be."""
    meshes_ = [*smaller_meshes(case.mesh, keep=case.axis), case.mesh]
    sizes = sorted(itertools.product(range(1, _TINY + 1), repeat=2), key=lambda pair: (sum(pair), pair))
    kinds = dict.fromkeys([case.ids, Ids(case.ids.kind), Ids(), Ids("ends")])
    for mesh, (rows, hidden), leading, ids in itertools.product(meshes_, sizes, tiny(case.leading), kinds):
        changes = {"mesh": mesh, "vocabulary": rows, "hidden": hidden, "leading": leading, "ids": ids}
        if case.padding_idx is not None:
            changes["padding_idx"] = min(case.padding_idx, rows - 1)
        yield from _SIMPLER.changed(case, scope, **changes)
    yield from _SIMPLER.plainer(case, scope)
    if case.padding_idx is not None:
        for token in range(case.padding_idx):
            yield from _SIMPLER.changed(case, scope, padding_idx=token)


def _measure(case: EmbeddingCase) -> tuple[Any, ...]:
    """What is simpler has the smaller measure."""
    options, made = len(_SIMPLER.options(case)), len(_SIMPLER.recipes(case))
    tokens = sum(math.prod(dims) for dims in case.leading)
    ids = list(IDS).index(case.ids.kind), case.ids.seed
    sizes = case.rows + case.hidden, case.vocabulary, len(case.leading), tokens
    return (case.mesh.size, len(case.mesh.axes), *sizes, options, made, case.padding_idx or 0, *ids)


def within(case: EmbeddingCase, scope: Scope) -> bool:
    """Whether the dtype and the sizes of a case are such as the scope allows."""
    n = case.parallel_size
    sequence = not case.sequence_parallel or all(dims[0] % n == 0 for dims in case.leading)
    sizes = (case.rows % n == 0 or scope.has("embedding_uneven")) and (sequence or scope.has("uneven_sequence"))
    return sizes and case.dtype in scope.dtypes


_SIMPLER = Simpler(EmbeddingCase, ("leading", "axis"), _measure, within)
