"""Draws steps of a GPT: mesh, model, how layers are dealt and the batch is cut, options and data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from reference.gpt import MODEL_AXES, GptCase, GptRecipes, Positions, Recompute, Schedule
from reference.ids import IDS, Ids
from reference.mesh import Mesh
from reference.recipe import Recipe
from strategies.layers import one_in
from strategies.mesh import smaller_meshes
from strategies.scope import Scope
from strategies.simpler import Simpler

#: The optional features of the subject.
FEATURES = {
    "gpt_gpipe": "the schedule GPipe",
    "gpt_1f1b": "the schedule 1F1B",
    "gpt_interleaved": "the schedule interleaved 1F1B",
    "gpt_interleaved_any": "interleaved 1F1B of a number of micro-batches that the ranks do not divide",
    "gpt_untied": "an output with a weight of its own",
    "gpt_tied": "an output that shares the embedding's weight",
    "gpt_learned_positions": "learned position embeddings",
    "gpt_rotary": "rotary position embedding",
    "gpt_no_positions": "no position embedding at all",
    "gpt_uneven_depths": "stages with different numbers of layers",
    "gpt_no_layers": "stages without a layer",
    "gpt_sizes": "micro-batches of different sizes",
    "gpt_uneven_vocabulary": "a vocabulary that the tensor-parallel ranks do not divide",
    "gpt_few": "fewer micro-batches than stages",
    "gpt_gqa": "several query heads share a key/value head, which several ranks may hold",
    "gpt_layer_norm": "layer norms, with biases",
    "gpt_rms_norm": "RMS norms",
    "gpt_gelu": "an mlp with gelu(up)",
    "gpt_swiglu": "an mlp with silu(gate) * up",
    "gpt_qk_norm": "a norm of each head's queries and keys",
    "gpt_bias": "biases in all linear layers",
    "gpt_sequence_parallel": "tokens are cut over the tensor-parallel ranks outside attention and mlp",
    "gpt_selective_recompute": "backward computes attention again",
    "gpt_full_recompute": "backward computes each layer again",
    "gpt_stage_recompute": "backward computes the whole stage again",
    "gpt_dropout": "dropout of what is embedded, of attention, and before the residual additions",
    "gpt_main_grad": "gradients accumulated in fp32 in a buffer beside the parameter",
    "gpt_sharded": "an optimizer that is sharded over dp",
}

MOST_RANKS, MOST_LAYERS, MOST_MICRO_BATCHES, MOST_HIDDEN, MOST_CHUNKS = 8, 4, 4, 16, 3
#: See `strategies.transformer.LEAST_NORMED`.
LEAST_NORMED = 4
_SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved")


@st.composite
def cases(draw: st.DrawFn, scope: Scope) -> GptCase:
    """A step within the scope. The plainest one has one layer of one head, on one rank."""
    mesh = draw(_meshes(scope))
    tp, pp = mesh.axis_size("tp"), mesh.axis_size("pp")
    schedule = draw(st.sampled_from([one for one in _SCHEDULES if scope.has(f"gpt_{one}")] or _SCHEDULES[:1]))
    chunks = draw(st.integers(2, max(2, min(MOST_CHUNKS, MOST_LAYERS // pp)))) if schedule == "interleaved" else 1
    sizes = _sizes(draw, schedule, pp, scope)
    positions = draw(st.sampled_from(_positions(scope)))
    sequence_parallel = scope.has("gpt_sequence_parallel") and tp > 1 and draw(st.booleans())
    length = draw(st.integers(2, 5))
    length = max(tp, length // tp * tp) if sequence_parallel else length
    heads = tp * draw(st.integers(1, 2 if tp < 4 else 1))
    qk_norm = scope.has("gpt_qk_norm") and one_in(draw, 4)
    least = LEAST_NORMED if qk_norm else max(1 + (positions == "rotary"), -(-LEAST_NORMED // heads))
    size = max(least, draw(st.sampled_from((2, 4, 3))))
    size = size if heads * size <= MOST_HIDDEN else least
    size += positions == "rotary" and size % 2
    vocabulary = draw(st.integers(tp, 11))
    vocabulary = vocabulary if scope.has("gpt_uneven_vocabulary") else vocabulary // tp * tp
    dropout = draw(st.sampled_from((0.5, 0.5, 0.1))) if scope.has("gpt_dropout") and one_in(draw, 6) else 0.0
    sharded = scope.has("gpt_sharded") and mesh.axis_size("dp") > 1 and one_in(draw, 2)
    return GptCase(
        mesh=mesh,
        vocabulary=max(2, vocabulary) if tp == 1 else vocabulary,
        hidden=heads * size,
        heads=heads,
        kv_heads=_kv_heads(draw, heads, tp, scope),
        ffn=tp * draw(st.integers(1, 3)),
        depths=_depths(draw, pp * chunks, scope),
        sizes=sizes,
        length=length,
        counts=_counts(draw, length),
        schedule=schedule,
        chunks=chunks,
        dtype=draw(st.sampled_from(scope.dtypes)),
        tied=_either(draw, scope, "gpt_tied", "gpt_untied"),
        positions=positions,
        norm="rms" if _either(draw, scope, "gpt_rms_norm", "gpt_layer_norm") else "layer",
        activation="swiglu" if _either(draw, scope, "gpt_swiglu", "gpt_gelu") else "gelu",
        qk_norm=qk_norm,
        bias=scope.has("gpt_bias") and draw(st.booleans()),
        sequence_parallel=sequence_parallel,
        recompute=draw(st.sampled_from(_recomputations(scope))) if dropout or one_in(draw, 3) else "none",
        dropout=dropout,
        main_grad=scope.has("gpt_main_grad") and not sharded and one_in(draw, 4),
        update="sharded" if sharded else "none",
        ids=Ids(draw(st.sampled_from(list(IDS))), draw(_seeds)),
        recipes=GptRecipes(*(Recipe(draw(st.sampled_from(_KINDS)), draw(_seeds)) for _ in range(2))),
    )


def _counts(draw: st.DrawFn, length: int) -> tuple[int, ...]:
    """Without a valid token there is nothing to be wrong but a division by zero: few cases are such."""
    counts = tuple(draw(st.lists(st.integers(0, length), min_size=1, max_size=4)))
    return counts if any(counts) or one_in(draw, 4) else (length,)


_seeds = st.integers(0, 99)
_KINDS = ("normal", "normal", "normal", "uniform")


@st.composite
def _meshes(draw: st.DrawFn, scope: Scope) -> Mesh:
    """Any of tp, pp and dp, in any order, twos more often than the rest; now and then another axis, of replicas."""
    room = min(scope.max_world, MOST_RANKS)
    others = [axis for axis in scope.axes if axis not in MODEL_AXES]
    wanted = [axis for axis in MODEL_AXES if axis in scope.axes]
    axes = list(draw(st.permutations(wanted)))
    if others and one_in(draw, 8):
        axes.insert(draw(st.integers(0, len(axes))), draw(st.sampled_from(others)))
    found = []
    for axis in axes:
        size = draw(st.sampled_from([*range(1, room + 1), *[2] * (room if room > 1 else 0)]))
        # A head for each rank, and hidden sizes are small.
        size = size if axis != "tp" or size in (1, 2, 4) else 2
        size = size if axis in MODEL_AXES else min(size, 2)
        found.append((axis, size))
        room //= size
    return Mesh(tuple(found))


def _either(draw: st.DrawFn, scope: Scope, one: str, other: str) -> bool:
    """Whether it is the one; both may be drawn where the scope has both."""
    if scope.has(one) and scope.has(other):
        return draw(st.booleans())
    return scope.has(one)


def _positions(scope: Scope) -> list[Positions]:
    found: list[Positions] = ["none"] if scope.has("gpt_no_positions") else []
    found += ["learned", "learned"] if scope.has("gpt_learned_positions") else []
    found += ["rotary"] if scope.has("gpt_rotary") else []
    return found or ["none"]


def _recomputations(scope: Scope) -> list[Recompute]:
    kinds: list[Recompute] = ["selective", "full", "stage"]
    return [kind for kind in kinds if scope.has(f"gpt_{kind}_recompute")] or ["none"]


def _sizes(draw: st.DrawFn, schedule: Schedule, pp: int, scope: Scope) -> tuple[int, ...]:
    if schedule == "interleaved" and not scope.has("gpt_interleaved_any"):
        count = pp * draw(st.integers(1, max(1, MOST_MICRO_BATCHES // pp)))
    else:
        least = 1 if scope.has("gpt_few") else pp
        count = draw(st.integers(least, max(least, MOST_MICRO_BATCHES)))
    if scope.has("gpt_sizes") and count > 1 and draw(st.booleans()):
        return tuple(draw(st.lists(st.integers(1, 2), min_size=count, max_size=count)))
    return (draw(st.integers(1, 2)),) * count


def _depths(draw: st.DrawFn, stages: int, scope: Scope) -> tuple[int, ...]:
    """No more than the most layers in all, or one for each stage."""
    most = max(1, MOST_LAYERS // stages)
    if not scope.has("gpt_uneven_depths"):
        return (draw(st.integers(1, most)),)
    depths = draw(st.lists(st.integers(1, most), min_size=1, max_size=min(3, stages)))
    if scope.has("gpt_no_layers") and one_in(draw, 4):
        depths[draw(st.integers(0, len(depths) - 1))] = 0
    return tuple(depths)


def _kv_heads(draw: st.DrawFn, heads: int, tp: int, scope: Scope) -> int:
    fewer = [n for n in range(1, heads) if heads % n == 0 and (n % tp == 0 or tp % n == 0)]
    return draw(st.sampled_from(fewer)) if fewer and scope.has("gpt_gqa") and one_in(draw, 3) else heads


def simpler(case: GptCase, scope: Scope) -> Iterator[GptCase]:
    """Simpler cases within the scope: the smallest meshes, whole or with few options; then one thing at a time."""
    for mesh in [*smaller_meshes(case.mesh), case.mesh]:
        for sizes in small(case, mesh):
            yield from _SIMPLER.changed(case, scope, mesh=mesh, **sizes)
    options = _SIMPLER.options(case)
    for count in range(3):
        for kept in itertools.combinations(options, count):
            plain = {name: value for name, value in options.items() if name not in kept}
            yield from _SIMPLER.changed(case, scope, **plain, ids=Ids(), recipes=GptRecipes())
            yield from _SIMPLER.changed(case, scope, **plain)
    yield from _SIMPLER.plainer(case, scope)
    for name in ("depths", "sizes", "counts"):
        values = getattr(case, name)
        yield from _SIMPLER.changed(case, scope, **{name: values[:1]})
        for i in range(len(values)):
            yield from _SIMPLER.changed(case, scope, **{name: values[:i] + values[i + 1 :]})
            for less in {0, 1, values[i] - 1}:
                if less < values[i]:
                    yield from _SIMPLER.changed(case, scope, **{name: (*values[:i], less, *values[i + 1 :])})
    n = case.mesh.axis_size("tp")
    size = case.hidden // case.heads
    yield from _SIMPLER.changed(case, scope, kv_heads=case.heads)
    yield from _SIMPLER.changed(case, scope, heads=n, hidden=n * size, kv_heads=n)
    for width in (2, 4):
        yield from _SIMPLER.changed(case, scope, hidden=case.heads * width)
    yield from _SIMPLER.changed(case, scope, ffn=n)
    for vocabulary in range(n, case.vocabulary):
        yield from _SIMPLER.changed(case, scope, vocabulary=vocabulary)
    for length in range(1, case.length):
        counts = tuple(min(count, length) for count in case.counts)
        yield from _SIMPLER.changed(case, scope, length=length, counts=counts)
    yield from _SIMPLER.changed(case, scope, chunks=case.chunks - 1)
    yield from _SIMPLER.changed(case, scope, ids=Ids())


def small(case: GptCase, mesh: Mesh) -> Iterator[dict[str, Any]]:
    """Small sizes on a mesh, the smallest first; then those of the case."""
    n, pp = mesh.axis_size("tp"), mesh.axis_size("pp")
    length = max(2, n)
    stages = {} if case.schedule == "interleaved" or case.chunks == 1 else {"chunks": 1}
    for size, few in itertools.product((2, 4), ((1,), (1, 1))):
        tiny = {"heads": n, "kv_heads": n, "hidden": n * size, "ffn": n, "sizes": few, **stages}
        yield {**tiny, "length": length, "counts": (length,), "vocabulary": max(2, n)}
        yield {**tiny, "length": length, "counts": tuple(min(count, length) for count in case.counts)}
    yield {"depths": case.depths[: pp * case.chunks]}


def measure(case: GptCase) -> tuple[Any, ...]:
    """What is simpler has the smaller measure."""
    lists = case.depths, case.sizes, case.counts
    sizes = case.heads + case.hidden + case.ffn + case.vocabulary + (case.heads - case.kv_heads)
    return (
        case.mesh.size,
        len(case.mesh.axes),
        len(_SIMPLER.options(case)),
        case.chunks,
        case.micro_batches,
        sum(map(len, lists)),
        sum(map(sum, lists)),
        sizes + case.length,
        len(_SIMPLER.recipes(case)),
        case.ids.kind != "spread",
        case.ids.seed,
    )


def within(case: GptCase, scope: Scope) -> bool:
    """Whether a case is such as the scope allows."""
    normed = min(case.hidden, case.hidden // case.heads if case.qk_norm else LEAST_NORMED)
    return (
        normed >= LEAST_NORMED
        and case.layers + case.stages <= 2 * max(MOST_LAYERS, case.stages)
        and case.dtype in scope.dtypes
        and all(scope.has(feature) for feature, needed in needs(case).items() if needed)
    )


def needs(case: GptCase) -> dict[str, bool]:
    """The optional features that a case needs."""
    pp, m, tp = case.mesh.axis_size("pp"), case.micro_batches, case.mesh.axis_size("tp")
    depths = {case.depth(stage) for stage in range(case.stages)}
    return {
        f"gpt_{case.schedule}": True,
        "gpt_interleaved_any": case.schedule == "interleaved" and m % pp != 0,
        "gpt_tied" if case.tied else "gpt_untied": True,
        {"none": "gpt_no_positions", "learned": "gpt_learned_positions", "rotary": "gpt_rotary"}[case.positions]: True,
        "gpt_uneven_depths": len(depths) > 1,
        "gpt_no_layers": 0 in depths,
        "gpt_sizes": len(set(case.sizes)) > 1,
        "gpt_uneven_vocabulary": case.vocabulary % tp != 0,
        "gpt_few": m < pp and case.schedule != "interleaved",
        "gpt_gqa": case.kv_heads < case.heads,
        f"gpt_{case.norm}_norm": True,
        f"gpt_{case.activation}": True,
        "gpt_qk_norm": case.qk_norm,
        "gpt_bias": case.bias,
        "gpt_sequence_parallel": case.sequence_parallel,
        f"gpt_{case.recompute}_recompute": case.recompute != "none",
        "gpt_dropout": case.dropout > 0,
        "gpt_main_grad": case.main_grad,
        "gpt_sharded": case.update == "sharded",
    }


_SIMPLER = Simpler(GptCase, ("depths", "sizes", "length", "counts", "chunks"), measure, within, Recipe("normal"))
