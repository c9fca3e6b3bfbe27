"""Draws transformer layers: mesh, sizes, options and data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from reference.attention import Mask
from reference.recipe import Recipe
from reference.transformer import DROPOUT, Recompute, TransformerCase, TransformerRecipes
from strategies.layers import BACKWARD, one_in
from strategies.mesh import meshes, smaller_meshes
from strategies.scope import Scope
from strategies.simpler import Simpler

#: The optional features of the subject.
FEATURES = {
    "transformer_gqa": "several query heads share a key/value head of their rank",
    "transformer_mqa_replicated": "fewer key/value heads than ranks: several ranks hold the same one",
    "transformer_swiglu": "an mlp with a gate, silu(gate) * up, instead of gelu(up)",
    "transformer_rms_norm": "RMS norms instead of layer norms",
    "transformer_qk_norm": "a norm of each head's queries and keys, whose weights all heads share",
    "transformer_rotary": "rotary position embedding, in half-split pairs",
    "transformer_padding_mask": "a mask of visible keys for each sequence",
    "transformer_selective_recompute": "backward computes attention again",
    "transformer_full_recompute": "backward computes the whole layer again",
    "transformer_dropout": "dropout in attention and before the residual additions",
    "transformer_sequence_parallel": "tokens are cut over the ranks outside attention and mlp",
    "explicit_group": "the layer is given a process group, along any axis, instead of taking the default",
    "main_grad": "gradients accumulated in fp32 in a buffer beside the parameter",
}

MOST_HEADS, MOST_HIDDEN, MOST_FFN = 8, 32, 16

#: A layer norm of two features gives their sign, and so does an RMS norm of one: what the gradient is, is left over by
#: cancellation, and roundings of values that are all nearly 1 go the same way.
LEAST_NORMED = 4
_HEAD_SIZES = (2, 4, 1, 3, 8)
_TOKENS = (2, 4, 3, 8, 5, 7, 6, 1)
#: With rotary embedding: bf16 has no odd positions from 256 on.
_MANY_TOKENS = 320


@st.composite
def cases(draw: st.DrawFn, scope: Scope) -> TransformerCase:
    """A layer within the scope. The plainest one has one head of four features, on one rank."""
    explicit = scope.has("explicit_group") and draw(st.booleans())
    axis = draw(st.sampled_from(scope.axes)) if explicit else "tp"
    mesh = draw(meshes(scope.axes, scope.max_world, first=axis))
    n = mesh.axis_size(axis)
    rotary = scope.has("transformer_rotary") and draw(st.booleans())
    qk_norm = scope.has("transformer_qk_norm") and draw(st.booleans())
    long = rotary and one_in(draw, 12)
    heads = n if long else n * draw(st.integers(1, max(1, MOST_HEADS // n)))
    least = LEAST_NORMED if qk_norm else max(1 + rotary, -(-LEAST_NORMED // heads))
    size = max(least, draw(st.sampled_from(_HEAD_SIZES)))
    size = size if heads * size <= MOST_HIDDEN else max(least, 2)
    size += rotary and size % 2
    sequence_parallel = scope.has("transformer_sequence_parallel") and one_in(draw, 3)
    leading = draw(st.lists(st.tuples(st.sampled_from(_TOKENS), st.integers(1, 3)), min_size=1, max_size=2))
    if long:
        leading = [(_MANY_TOKENS, 1)]
    if sequence_parallel:
        leading = [(max(n, tokens // n * n), sequences) for tokens, sequences in leading]
    if one_in(draw, 3):  # see `strategies.layers.alike`
        leading = [leading[0]] * len(leading)
    dropout = draw(st.sampled_from(DROPOUT[1:])) if scope.has("transformer_dropout") and one_in(draw, 6) else 0.0
    return TransformerCase(
        mesh=mesh,
        hidden=heads * size,
        heads=heads,
        kv_heads=draw(_kv_heads(heads, n, scope)),
        ffn=n * draw(st.integers(1, max(1, MOST_FFN // n))),
        leading=tuple(leading),
        axis=axis,
        dtype=draw(st.sampled_from(scope.dtypes)),
        norm="rms" if scope.has("transformer_rms_norm") and draw(st.booleans()) else "layer",
        activation="swiglu" if scope.has("transformer_swiglu") and draw(st.booleans()) else "gelu",
        qk_norm=qk_norm,
        rotary=rotary,
        mask=draw(st.sampled_from(_masks(scope))),
        bias=draw(st.booleans()),
        sequence_parallel=sequence_parallel,
        recompute=draw(st.sampled_from(["none", *recomputations(scope.features)])),
        dropout=dropout,
        seed=draw(st.integers(0, 99)) if dropout else 0,
        explicit_group=explicit,
        main_grad=scope.has("main_grad") and one_in(draw, 5),
        input_requires_grad=not one_in(draw, 6),
        transposed=draw(st.booleans()),
        backward=draw(st.sampled_from(BACKWARD)),
        init=scope.checks_initialization and not dropout and one_in(draw, 4),
        recipes=draw(_recipes()),
    )


@st.composite
def _kv_heads(draw: st.DrawFn, heads: int, n: int, scope: Scope) -> int:
    """As many as heads, or fewer of a kind that the scope has."""
    kind, which = draw(st.sampled_from(["own", "transformer_gqa", "transformer_mqa_replicated"])), draw(_seeds)
    fewer = [count for count in range(1, heads) if heads % count == 0 and _shared(count, heads, n) == kind]
    return fewer[which % len(fewer)] if fewer and scope.has(kind) else heads


_seeds = st.integers(0, 99)


def _shared(kv_heads: int, heads: int, n: int) -> str | None:
    """The feature that such a number of key/value heads needs; "" where they cannot be cut over n ranks."""
    if kv_heads < n:
        return "transformer_mqa_replicated" if n % kv_heads == 0 else ""
    if kv_heads % n:
        return ""
    return "transformer_gqa" if kv_heads < heads else None


def _masks(scope: Scope) -> list[Mask]:
    return ["causal", "padding", "none"] if scope.has("transformer_padding_mask") else ["causal", "none"]


def recomputations(features: frozenset[str]) -> list[Recompute]:
    """What a candidate with these features can compute again."""
    kinds: list[Recompute] = ["selective", "full"]
    return [kind for kind in kinds if f"transformer_{kind}_recompute" in features]


#: For each tensor, beside normal data. Only where the layer is linear in it are large values of use: elsewhere they
#: saturate softmax, or drown the residual.
_OTHER_KINDS = {
    "input": ("uniform", "spiky", "cancelling"),
    "weight": ("uniform",),
    "vector": ("uniform",),
    "output_grad": ("uniform", "spiky", "cancelling"),
}


@st.composite
def _recipes(draw: st.DrawFn) -> TransformerRecipes:
    """Normal data; in one case of three one tensor of another kind."""
    made = {name: Recipe("normal", draw(_seeds)) for name in _OTHER_KINDS}
    if one_in(draw, 3):
        which = draw(st.sampled_from(list(_OTHER_KINDS)))
        made[which] = Recipe(draw(st.sampled_from(_OTHER_KINDS[which])), draw(_seeds))
    return TransformerRecipes(**made)


def simpler(case: TransformerCase, scope: Scope) -> Iterator[TransformerCase]:
    """Simpler cases within the scope. A run takes long, so few: small sizes on the smallest meshes; then without all
    options but one or two; then one thing at a time as plain as can be."""
    meshes_ = [*smaller_meshes(case.mesh, keep=case.axis), case.mesh]
    for mesh in meshes_:
        for changes in _small(case, mesh.axis_size(case.axis)):
            yield from _SIMPLER.changed(case, scope, mesh=mesh, **changes)
    options = _SIMPLER.options(case)
    for count in range(3):
        for kept in itertools.combinations(options, count):
            plain = {name: value for name, value in options.items() if name not in kept}
            yield from _SIMPLER.changed(case, scope, **plain, recipes=TransformerRecipes())
            yield from _SIMPLER.changed(case, scope, **plain)
    yield from _SIMPLER.plainer(case, scope)
    n = case.parallel_size
    yield from _SIMPLER.changed(case, scope, kv_heads=case.heads)
    yield from _SIMPLER.changed(case, scope, heads=n, hidden=n * case.head_size, kv_heads=n)
    for size in (2, 4):
        yield from _SIMPLER.changed(case, scope, hidden=case.heads * size)
    yield from _SIMPLER.changed(case, scope, ffn=n)
    for leading in _few_tokens(case, n):
        yield from _SIMPLER.changed(case, scope, leading=leading)
    yield from _SIMPLER.changed(case, scope, seed=0)


def _small(case: TransformerCase, n: int) -> Iterator[dict[str, Any]]:
    """Small sizes on ``n`` ranks in which key/value heads are shared as they are in the case, the smallest first."""
    shared = _shared(case.kv_heads, case.heads, case.parallel_size)
    heads, kv_heads = {None: (n, n), "transformer_gqa": (2 * n, n)}.get(shared, (n, max(1, n // 2)))
    for size, leading in itertools.product((2, 4), _few_tokens(case, n)):
        yield {"heads": heads, "kv_heads": kv_heads, "hidden": heads * size, "ffn": n, "leading": leading}
    yield {}


def _few_tokens(case: TransformerCase, n: int) -> list[tuple[tuple[int, int], ...]]:
    one, two = (max(2, n), 1), (2 * n, 2)
    return [(one,), (two,), (one, one)] if len(case.leading) > 1 else [(one,), (two,)]


def _measure(case: TransformerCase) -> tuple[Any, ...]:
    """What is simpler has the smaller measure."""
    options, made = len(_SIMPLER.options(case)), len(_SIMPLER.recipes(case))
    tokens = sum(math.prod(dims) for dims in case.leading)
    sizes = case.heads + case.hidden + case.ffn + (case.heads - case.kv_heads), len(case.leading), tokens
    return (case.mesh.size, len(case.mesh.axes), options, *sizes, made, case.seed)


def within(case: TransformerCase, scope: Scope) -> bool:
    """Whether the dtype and the sizes of a case are such as the scope allows."""
    shared = _shared(case.kv_heads, case.heads, case.parallel_size)
    normed = min(case.hidden, case.head_size if case.qk_norm else LEAST_NORMED)
    return normed >= LEAST_NORMED and (shared is None or scope.has(shared)) and case.dtype in scope.dtypes


_SIMPLER = Simpler(TransformerCase, ("leading", "axis", "seed"), _measure, within, Recipe("normal"))
