"""Draws steps of a pipeline: stages, schedule, how the batch is cut, what crosses the borders, and data."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from reference.pipeline import Activation, Block, Invalid, Kind, PipelineCase, PipelineRecipes, Schedule, Skip
from reference.pipeline_gradients import expected
from reference.pipeline_stages import exact, tensors
from reference.recipe import Recipe
from strategies.layers import one_in
from strategies.mesh import meshes
from strategies.scope import Scope

#: The optional features of the subject.
FEATURES = {
    "pipeline_any_axis": "along any axis of the mesh, and not only pp",
    "pipeline_gpipe": "the schedule GPipe",
    "pipeline_gpipe_chunks": "GPipe with several stages on a rank",
    "pipeline_1f1b": "the schedule 1F1B",
    "pipeline_interleaved": "the schedule interleaved 1F1B",
    "pipeline_interleaved_any": "interleaved 1F1B of a number of micro-batches that the ranks do not divide",
    "pipeline_interleaved_zero_bubble": "the schedule zero bubble, interleaved",
    "pipeline_zbv": "the schedule zero bubble whose stages go down the ranks and up again",
    "pipeline_few": "fewer micro-batches than ranks",
    "pipeline_uneven": "micro-batches of one sample more or less",
    "pipeline_sizes": "micro-batches of any sizes, beside those",
    "pipeline_widths": "borders of different widths",
    "pipeline_skip": "a second tensor across the borders that needs a gradient",
    "pipeline_skip_unused": "such a tensor of which some stages, or all, make no use",
    "pipeline_ids": "whole numbers across the borders",
    "pipeline_tied": "a weight that several stages share",
    "pipeline_frozen": "parameters that do not train",
    "pipeline_plain": "stages without parameters",
    "pipeline_steps": "several steps, gradients zeroed between them",
    "pipeline_accumulate": "several steps whose gradients add up",
    "pipeline_recompute": "activations that are computed again in backward",
    "pipeline_dropout": "dropout in a stage",
    "pipeline_sharded": "an optimizer sharded over another axis, after the gradients of tied weights are summed",
    "pipeline_same_bits": "gradients added in the order of the micro-batches: the bits of one process",
    "pipeline_refuses": "refuses, on every rank, no micro-batches, too few samples, other numbers of stages",
    "pipeline_refuses_borders": "refuses, on every rank, borders that do not fit",
    "pipeline_raises": "a stage that raises ends all ranks with its error",
}

MOST_MICRO_BATCHES, MOST_SAMPLES, MOST_TOKENS, MOST_FEATURES, MOST_CHUNKS, MOST_BLOCKS = 6, 3, 3, 4, 3, 4
#: In one case of twelve, of one sample each: buffers that go round come round only then.
MANY_MICRO_BATCHES = 20
#: Stages in all: a case runs them on every rank beside its own, for comparison.
_MOST_STAGES = 12
#: Results of a second step beyond it come with overflows on the way, in fp16 first.
_LARGEST_AFTER_A_STEP = 2.0**10
_EXACT = ("lattice",) * 8 + ("constant_per_rank", "zeros")
_ROUNDING = ("normal",) * 3 + ("uniform", "cancelling", "spiky") + ("lattice",)
#: In two cases of three such that whole numbers stay exact.
_ACTIVATIONS: tuple[tuple[Activation, ...], ...] = ("none", "none", "relu"), ("none", "relu", "tanh")
_SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv")


@st.composite
def cases(draw: st.DrawFn, scope: Scope) -> PipelineCase:
    """A case within the scope. The plainest one has one stage of one feature on each rank, and one micro-batch."""
    own = scope.usual("pp")
    axis = draw(st.sampled_from(scope.axes)) if scope.has("pipeline_any_axis") and one_in(draw, 4) else own
    mesh = draw(meshes(scope.axes, scope.max_world, first=axis, most=1))
    p = mesh.axis_size(axis)
    schedule = draw(st.sampled_from([one for one in _SCHEDULES if scope.has(f"pipeline_{one}")] or _SCHEDULES[:1]))
    chunks = _chunks(draw, schedule, p, scope)
    recipes = draw(_recipes())
    dtype = draw(st.sampled_from(scope.dtypes))
    many = one_in(draw, 12)
    micro_batches = _micro_batches(draw, schedule, p, scope, MANY_MICRO_BATCHES if many else MOST_MICRO_BATCHES)
    length = draw(st.integers(1, MOST_TOKENS))
    steps = draw(st.integers(1, 2)) if scope.has("pipeline_steps") else 1
    several = len(mesh.axes) == 2 and mesh.size > p
    sharded = scope.has("pipeline_sharded") and several and one_in(draw, 2)
    recompute = scope.has("pipeline_recompute") and one_in(draw, 3)
    # Dropout shows whether recomputation draws the same numbers, and leaves them where they were.
    blocks = draw(_blocks(scope, dropout=0 if sharded else 2 if recompute else 6))
    case = PipelineCase(
        mesh=mesh,
        schedule=schedule,
        chunks=chunks,
        blocks=blocks,
        depths=tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))),
        widths=_widths(draw, p * chunks, scope),
        sizes=(1,) * micro_batches if many else _sizes(draw, micro_batches, scope),
        length=length,
        counts=tuple(draw(st.lists(st.integers(0, length), min_size=1, max_size=6))),
        steps=steps,
        accumulate=steps > 1 and scope.has("pipeline_accumulate") and not sharded and draw(st.booleans()),
        skip=_skip(draw, scope),
        ids=scope.has("pipeline_ids") and draw(st.booleans()),
        recompute=recompute,
        axis=axis,
        dtype=dtype,
        loss=draw(st.sampled_from(["sum", "token_mean"])),
        update="sharded" if sharded else "none",
        recipes=PipelineRecipes(**{**vars(recipes), "input": _without_spikes(recipes.input, dtype)}),
    )
    case = _invalid(draw, case, scope)
    return _steps_in_range(_plain_activations(case)) if not exact(case) else case


def _chunks(draw: st.DrawFn, schedule: Schedule, p: int, scope: Scope) -> int:
    if schedule == "zbv":
        return 2
    if schedule == "1f1b" or (schedule == "gpipe" and not scope.has("pipeline_gpipe_chunks")):
        return 1
    most = max(1, min(MOST_CHUNKS, _MOST_STAGES // p))
    if schedule == "gpipe":
        return draw(st.integers(2, most)) if most > 1 and one_in(draw, 4) else 1
    return draw(st.integers(min(2, most), most))


def _micro_batches(draw: st.DrawFn, schedule: Schedule, p: int, scope: Scope, most: int) -> int:
    divisible = schedule in ("interleaved", "interleaved_zero_bubble") and not scope.has("pipeline_interleaved_any")
    if divisible:
        return p * draw(st.integers(1, max(1, most // p)))
    least = 1 if scope.has("pipeline_few") else p
    return draw(st.integers(least, max(least, most)))


def _sizes(draw: st.DrawFn, micro_batches: int, scope: Scope) -> tuple[int, ...]:
    if scope.has("pipeline_sizes") and scope.has("pipeline_uneven") and draw(st.booleans()):
        sizes = st.lists(st.integers(1, MOST_SAMPLES), min_size=micro_batches, max_size=micro_batches)
        return tuple(draw(sizes))
    each = draw(st.integers(1, MOST_SAMPLES - 1))
    longer = draw(st.integers(0, micro_batches - 1)) if scope.has("pipeline_uneven") else 0
    return (each + 1,) * longer + (each,) * (micro_batches - longer)


def _widths(draw: st.DrawFn, stages: int, scope: Scope) -> tuple[int, ...]:
    """Few features where there are many stages, so that whole numbers stay exact."""
    features = st.integers(1, MOST_FEATURES if stages <= 4 else 2)
    if scope.has("pipeline_widths") and draw(st.booleans()):
        return tuple(draw(st.lists(features, min_size=1, max_size=3)))
    return (draw(features),)


def _skip(draw: st.DrawFn, scope: Scope) -> Skip:
    if not scope.has("pipeline_skip") or draw(st.booleans()):
        return "none"
    kinds: list[Skip] = ["every"]
    kinds += ["last", "never"] if scope.has("pipeline_skip_unused") else []
    return draw(st.sampled_from(kinds))


@st.composite
def _blocks(draw: st.DrawFn, scope: Scope, dropout: int) -> tuple[Block, ...]:
    """dropout: in one of so many cases; 0 for none."""
    kinds: list[Kind] = ["linear", "linear"]
    optional: tuple[Kind, ...] = ("tied", "frozen", "plain")
    for kind in optional:
        kinds += [kind] if scope.has(f"pipeline_{kind}") else []
    activations: st.SearchStrategy[Activation] = st.sampled_from(_ACTIVATIONS[one_in(draw, 3)])
    blocks = [Block("linear", draw(activations), draw(st.booleans()))]
    for _ in range(draw(st.integers(0, MOST_BLOCKS - 1))):
        blocks.append(Block(draw(st.sampled_from(kinds)), draw(activations), draw(st.booleans())))
    if scope.has("pipeline_tied") and one_in(draw, 3):
        blocks.insert(draw(st.integers(1, len(blocks))), Block("tied", draw(activations), draw(st.booleans())))
    if dropout and scope.has("pipeline_dropout") and one_in(draw, dropout):
        blocks.insert(draw(st.integers(1, len(blocks))), Block("dropout"))
    return tuple(blocks)


@st.composite
def _recipes(draw: st.DrawFn) -> PipelineRecipes:
    """For two cases of three all exact, else of data that rounds."""
    kinds = st.sampled_from(_ROUNDING if draw(st.integers(0, 2)) == 2 else _EXACT)
    return PipelineRecipes(*(Recipe(draw(kinds), draw(st.integers(0, 99))) for _ in range(3)))


def _without_spikes(recipe: Recipe, dtype: str) -> Recipe:
    """fp16 would overflow."""
    return dataclasses.replace(recipe, kind="normal") if dtype == "fp16" and recipe.kind == "spiky" else recipe


def _plain_activations(case: PipelineCase) -> PipelineCase:
    """Where numbers round, which side of zero they fall on may depend on it: relu gives way to tanh. In low precision
    tanh also keeps them in range."""
    blocks = tuple(
        dataclasses.replace(block, activation="tanh") if block.activation == "relu" else block for block in case.blocks
    )
    return dataclasses.replace(case, blocks=blocks)


def _steps_in_range(case: PipelineCase) -> PipelineCase:
    """One step, where parameters that took a step grow so large that stages, which multiply them, leave the range."""
    if case.update == "none" or case.steps == 1 or case.invalid:
        return case
    results = [x for x in expected(case, tensors(case)).values() if x is not None]
    small = all(bool((x.abs() <= _LARGEST_AFTER_A_STEP).all()) for x in results)  # NaN is not
    return case if small else dataclasses.replace(case, steps=1)


def _invalid(draw: st.DrawFn, case: PipelineCase, scope: Scope) -> PipelineCase:
    kinds: list[Invalid] = []
    several = case.parallel_size > 1
    if scope.has("pipeline_refuses"):
        kinds += ["no_micro_batches", "small_batch"]
    if scope.has("pipeline_refuses") and several:
        kinds += ["chunks"] * 2
    if scope.has("pipeline_refuses_borders") and several:
        kinds += ["shape", "dtype"]
    if scope.has("pipeline_raises"):
        kinds += ["raises"] * 2
    if not kinds or not one_in(draw, 8):
        return case
    kind = draw(st.sampled_from(kinds))
    sizes = {"no_micro_batches": (), "small_batch": (*case.sizes, 0)}.get(kind, case.sizes)
    return dataclasses.replace(case, invalid=kind, sizes=sizes)
