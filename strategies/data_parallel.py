"""Draws training steps under data parallelism: network, buckets, token counts, who uses what, and data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

from hypothesis import strategies as st

from reference.data_parallel import (
    REDUCIBLE,
    DataParallelCase,
    DataParallelRecipes,
    Invalid,
    Kind,
    Layer,
    Loss,
    ReduceDtype,
    Reduction,
)
from reference.recipe import Recipe
from strategies.layers import one_in, scattered
from strategies.mesh import meshes, smaller_meshes
from strategies.scope import Scope
from strategies.simpler import Simpler

#: The optional features of the subject.
FEATURES = {
    "data_parallel_any_axis": "along any axis of the mesh, and not only dp",
    "data_parallel_no_sync": "micro-batches after which nothing is reduced",
    "data_parallel_sync_every": "several micro-batches in a step, reduced after each",
    "data_parallel_sum": "sums the ranks' gradients instead of averaging them",
    "data_parallel_reduce_dtype": "reduces in another format than that of the gradients",
    "data_parallel_main_grad": "gradients of bf16 and fp16 parameters accumulated in fp32",
    "data_parallel_unused": "parameters that no rank uses, or only some in some micro-batches",
    "data_parallel_order": "ranks that use the layers in different orders",
    "data_parallel_tied": "a weight that two layers share",
    "data_parallel_frozen": "parameters that do not train",
    "data_parallel_views": "gradients that are views of buckets",
    "data_parallel_overlap": "reduction that may overlap with backward, or not, with the same bits",
    "data_parallel_refuses": "refuses, on every rank, parameters that differ between the ranks",
}

MOST_LAYERS, MOST_FEATURES, MOST_MICRO_BATCHES, MOST_SAMPLES, MOST_TOKENS = 5, 4, 3, 2, 3
#: A format that is too low for main gradients shows only in the sum of many, and large ones: without a loss to hold,
#: they fill their format.
_MANY_MICRO_BATCHES, _LARGE = (8, 12), DataParallelRecipes(parameter=Recipe("zeros"))
#: In one case of ten, for what a buffer of a fixed size cuts off.
_MANY_FEATURES = (20, 100)
#: Of one parameter each; of several, with a partial last one; larger than some parameters; and all in one.
_BUCKETS = (1000, 1, 3, 8, 20)
_EXACT = ("lattice",) * 8 + ("constant_per_rank", "zeros")
_ROUNDING = ("normal",) * 3 + ("uniform", "cancelling", "spiky") + ("lattice",)


@st.composite
def cases(draw: st.DrawFn, scope: Scope) -> DataParallelCase:
    """A case within the scope. The plainest one has one layer of one feature and one token on each rank."""
    own = scope.usual("dp")
    axis = draw(st.sampled_from(scope.axes)) if scope.has("data_parallel_any_axis") and one_in(draw, 3) else own
    mesh = draw(meshes(scope.axes, scope.max_world, first=axis, most=1))
    n = mesh.axis_size(axis)
    layers = draw(_layers(scope))
    many = scope.has("data_parallel_no_sync") or scope.has("data_parallel_sync_every")
    micro_batches = draw(st.integers(1, MOST_MICRO_BATCHES)) if many else 1
    every = scope.has("data_parallel_sync_every") and (not scope.has("data_parallel_no_sync") or one_in(draw, 4))
    length, large = draw(st.integers(1, MOST_TOKENS)), one_in(draw, 10)
    dtype = draw(st.sampled_from(scope.dtypes))
    main_grad = scope.has("data_parallel_main_grad") and dtype in ("bf16", "fp16") and draw(st.booleans())
    losses, recipes = get_args(Loss)[::-1], draw(_recipes(dtype))
    if main_grad and many and draw(st.booleans()):
        micro_batches, losses, recipes = draw(st.integers(*_MANY_MICRO_BATCHES)), ("sum",), _LARGE
    formats: list[ReduceDtype] = ["same"]
    if scope.has("data_parallel_reduce_dtype"):
        formats += REDUCIBLE[dtype, main_grad]  # type: ignore[arg-type]
    reductions: list[Reduction] = ["average", "sum"] if scope.has("data_parallel_sum") else ["average"]
    steps = draw(st.integers(1, 2))
    skipped = []
    if scope.has("data_parallel_unused") and len(layers) > 1:
        which, total = st.integers(1, len(layers) - 1), steps * micro_batches
        place = st.tuples(which, st.integers(0, n - 1), st.integers(0, total - 1))
        skipped = draw(st.lists(place, max_size=4, unique=True))
        if steps > 1 and one_in(draw, 4):  # in one step by nobody
            layer, step = draw(which), draw(st.integers(0, steps - 1))
            skipped += [(layer, -1, step * micro_batches + m) for m in range(micro_batches)]
    case = DataParallelCase(
        mesh=mesh,
        layers=layers,
        features=draw(st.integers(*_MANY_FEATURES) if large else st.integers(1, MOST_FEATURES)),
        micro_batches=micro_batches,
        steps=steps,
        samples=draw(st.integers(1, MOST_SAMPLES)),
        length=length,
        counts=tuple(draw(st.lists(st.integers(0, length), min_size=1, max_size=8))),
        empty=tuple(draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=2, unique=True)))
        if one_in(draw, 4)
        else (),
        skipped=tuple(skipped),
        rotated=scope.has("data_parallel_order") and draw(st.booleans()),
        axis=axis,
        dtype=dtype,
        loss=draw(st.sampled_from(losses)),
        sync="every" if every else "last",
        reduction=draw(st.sampled_from(reductions)),
        reduce_dtype=draw(st.sampled_from(formats)),
        bucket=draw(st.sampled_from(_BUCKETS)),
        views=scope.has("data_parallel_views") and draw(st.booleans()),
        overlap=scope.has("data_parallel_overlap") and draw(st.booleans()),
        main_grad=main_grad,
        invalid=_invalid(draw, layers) if scope.has("data_parallel_refuses") and n > 1 and one_in(draw, 12) else None,
        recipes=recipes,
    )
    if case.exact or not large:
        return case
    ours = case.recipes
    ours = DataParallelRecipes(scattered(ours.input), scattered(ours.parameter), scattered(ours.coefficient))
    return replace(case, recipes=ours)


def _invalid(draw: st.DrawFn, layers: tuple[Layer, ...]) -> Invalid:
    kinds: list[Invalid] = ["number", "shape", "dtype", "order"]
    # One parameter has no other order.
    return draw(st.sampled_from(kinds if layers[0].bias else kinds[:3]))


@st.composite
def _layers(draw: st.DrawFn, scope: Scope) -> tuple[Layer, ...]:
    kinds: list[Kind] = ["own", "own"]
    for kind in ("tied", "frozen", "unused"):
        kinds += [kind] if scope.has(f"data_parallel_{kind}") else []
    first = Layer(draw(st.integers(1, MOST_FEATURES)), bias=draw(st.booleans()))
    layers = [first]
    for _ in range(draw(st.integers(0, MOST_LAYERS - 1))):
        kind, out, bias = draw(st.sampled_from(kinds)), draw(st.integers(1, MOST_FEATURES)), draw(st.booleans())
        layers.append(Layer(first.out if kind == "tied" else out, kind, bias))
    return tuple(layers)


@st.composite
def _recipes(draw: st.DrawFn, dtype: str) -> DataParallelRecipes:
    """For two cases of three all exact, else of data that rounds; nothing spiky in fp16, whose range it leaves."""
    rounding = draw(st.integers(0, 2)) == 2
    kinds = [k for k in (_ROUNDING if rounding else _EXACT) if dtype != "fp16" or k != "spiky"]
    return DataParallelRecipes(*(Recipe(draw(st.sampled_from(kinds)), draw(st.integers(0, 99))) for _ in range(3)))


def simpler(case: DataParallelCase, scope: Scope) -> Iterator[DataParallelCase]:
    """Simpler cases within the scope: the smallest meshes with few options, then one thing at a time."""
    meshes_ = [*smaller_meshes(case.mesh, keep=case.axis), case.mesh]
    rounding = DataParallelRecipes(*[Recipe("normal")] * 3)
    for mesh in meshes_:
        yield from _SIMPLER.changed(case, scope, mesh=mesh)
        # What a format loses may not show in the few whole numbers of a smaller mesh.
        yield from _SIMPLER.changed(case, scope, mesh=mesh, recipes=rounding)
    options = _SIMPLER.options(case)
    for count in range(2):
        for kept in itertools.combinations(options, count):
            plain = {name: value for name, value in options.items() if name not in kept}
            yield from _SIMPLER.changed(case, scope, **plain, layers=case.layers[:1])
            yield from _SIMPLER.changed(case, scope, **plain)
    yield from _SIMPLER.plainer(case, scope)
    for i in range(1, len(case.layers)):
        rest = tuple((at - (at > i), c, m) for at, c, m in case.skipped if at != i)
        yield from _SIMPLER.changed(case, scope, layers=case.layers[:i] + case.layers[i + 1 :], skipped=rest)
    for i, layer in enumerate(case.layers):
        for plainer in (Layer(case.layers[0].out if layer.kind == "tied" else 1, layer.kind, False), Layer(1)):
            layers = (*case.layers[:i], plainer, *case.layers[i + 1 :])
            yield from _SIMPLER.changed(case, scope, layers=layers)
    for i in range(len(case.skipped)):
        yield from _SIMPLER.changed(case, scope, skipped=case.skipped[:i] + case.skipped[i + 1 :])
    for i in range(len(case.counts)):
        yield from _SIMPLER.changed(case, scope, counts=case.counts[:i] + case.counts[i + 1 :])
    for name in ("features", "micro_batches", "samples", "length"):
        yield from _SIMPLER.changed(case, scope, **{name: getattr(case, name) - 1})


def _measure(case: DataParallelCase) -> tuple[Any, ...]:
    """What is simpler has the smaller measure."""
    options = len(_SIMPLER.options(case))
    layers = [(layer.kind != "own", layer.out, layer.bias) for layer in case.layers]
    sizes = case.features, case.micro_batches, case.samples, case.length, len(case.counts), len(case.skipped)
    made = len(_SIMPLER.recipes(case))
    mesh = case.mesh.size, len(case.mesh.axes)
    return (
        *mesh,
        options,
        len(layers),
        sum(out for _, out, _ in layers),
        sorted(layers),
        *sizes,
        made,
        sum(case.counts),
    )


def within(case: DataParallelCase, scope: Scope) -> bool:
    """Whether a case is such as the scope allows."""
    every = case.sync == "every" and case.micro_batches > 1
    needs = {
        "data_parallel_no_sync": case.micro_batches > 1 and case.sync == "last",
        "data_parallel_sync_every": every,
        "data_parallel_sum": case.reduction == "sum",
        "data_parallel_main_grad": case.main_grad,
    }
    return case.dtype in scope.dtypes and all(scope.has(feature) for feature, needed in needs.items() if needed)


_SIMPLER = Simpler(DataParallelCase, ("axis", "layers"), _measure, within)
