"""Simpler pipelines, and which optional features one needs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from reference.mesh import Mesh
from reference.pipeline import Block, PipelineCase, PipelineRecipes
from reference.pipeline_stages import tied
from reference.recipe import Recipe
from strategies.mesh import smaller_meshes
from strategies.scope import Scope
from strategies.simpler import Simpler


def simpler(case: PipelineCase, scope: Scope) -> Iterator[PipelineCase]:
    """Simpler cases within the scope: the smallest meshes with few options, then one thing at a time."""
    meshes_ = [*smaller_meshes(case.mesh, keep=case.axis), *_shorter(case), case.mesh]
    rounding = PipelineRecipes(*[Recipe("normal")] * 3)
    plain_sizes = (1,) * len(case.sizes) if 0 not in case.sizes else case.sizes
    for mesh in meshes_:
        for some in ({}, {"recipes": rounding}, {"blocks": case.blocks[:1]}, {"sizes": plain_sizes}):
            yield from _SIMPLER.changed(case, scope, mesh=mesh, **some)
    options = _SIMPLER.options(case)
    for count in range(2):
        for kept in itertools.combinations(options, count):
            plain = {name: value for name, value in options.items() if name not in kept}
            yield from _SIMPLER.changed(case, scope, **plain)
    yield from _SIMPLER.plainer(case, scope)
    for name in ("blocks", "depths", "widths", "counts", "sizes"):
        values = getattr(case, name)
        yield from _SIMPLER.changed(case, scope, **{name: values[:1]})
        yield from _SIMPLER.changed(case, scope, **{name: values[: len(values) // 2]})
        for i in range(len(values)):
            yield from _SIMPLER.changed(case, scope, **{name: values[:i] + values[i + 1 :]})
            if name == "blocks":
                for plainer in _plainer_blocks(values[i]):
                    yield from _SIMPLER.changed(case, scope, blocks=(*values[:i], plainer, *values[i + 1 :]))
            elif values[i] > 1:
                yield from _SIMPLER.changed(case, scope, **{name: (*values[:i], 1, *values[i + 1 :])})
                yield from _SIMPLER.changed(case, scope, **{name: (*values[:i], values[i] - 1, *values[i + 1 :])})
    for name in ("length", "steps", "chunks"):
        value = getattr(case, name)
        counts = tuple(min(count, value - 1) for count in case.counts)
        more: dict[str, Any] = {"counts": counts} if name == "length" else {}
        yield from _SIMPLER.changed(case, scope, **{name: value - 1}, **more)


def _shorter(case: PipelineCase) -> Iterator[Mesh]:
    """Meshes with fewer ranks along the axis: what needs three stages is not seen on one, two or all of them."""
    for n in range(3, case.parallel_size):
        yield Mesh(((case.axis, n),))
        yield Mesh(tuple((name, n if name == case.axis else size) for name, size in case.mesh.axes))


def _plainer_blocks(block: Block) -> Iterator[Block]:
    yield Block()
    yield dataclasses.replace(block, activation="none", bias=False)
    yield dataclasses.replace(block, activation="none")
    yield dataclasses.replace(block, bias=False)


def _measure(case: PipelineCase) -> tuple[Any, ...]:
    """What is simpler has the smaller measure."""
    blocks = sorted((block.kind != "linear", block.activation != "none", block.bias) for block in case.blocks)
    lists = case.depths, case.widths, case.sizes, case.counts
    return (
        case.mesh.size,
        len(case.mesh.axes),
        len(_SIMPLER.options(case)),
        case.chunks,
        len(blocks),
        blocks,
        sum(map(len, lists)),
        sum(map(sum, lists)),
        case.length,
        case.steps,
        len(_SIMPLER.recipes(case)),
    )


def within(case: PipelineCase, scope: Scope) -> bool:
    """Whether a case is such as the scope allows."""
    return case.dtype in scope.dtypes and all(scope.has(feature) for feature, needed in needs(case).items() if needed)


def needs(case: PipelineCase) -> dict[str, bool]:
    """The optional features that a case needs, but for the axis, which the mesh decides."""
    p, m, kinds = case.parallel_size, case.micro_batches, {block.kind for block in case.blocks}
    uneven = len(set(case.sizes)) > 1
    balanced = uneven and case.sizes == tuple(sorted(case.sizes, reverse=True)) and case.sizes[0] - case.sizes[-1] == 1
    grouped = case.schedule in ("interleaved", "interleaved_zero_bubble")
    valid = case.invalid not in ("no_micro_batches", "small_batch")
    return {
        "pipeline_gpipe": case.schedule == "gpipe",
        "pipeline_gpipe_chunks": case.schedule == "gpipe" and case.chunks > 1,
        "pipeline_1f1b": case.schedule == "1f1b",
        "pipeline_interleaved": case.schedule == "interleaved",
        "pipeline_interleaved_any": grouped and m % p != 0 and valid,
        "pipeline_interleaved_zero_bubble": case.schedule == "interleaved_zero_bubble",
        "pipeline_zbv": case.schedule == "zbv",
        "pipeline_few": m < p and valid and not grouped,
        "pipeline_uneven": balanced and valid,
        "pipeline_sizes": uneven and not balanced and valid,
        "pipeline_widths": len(set(case.widths)) > 1,
        "pipeline_skip": case.skip != "none",
        "pipeline_skip_unused": case.skip in ("last", "never"),
        "pipeline_ids": case.ids,
        "pipeline_tied": bool(tied(case)) or "tied" in kinds,
        "pipeline_frozen": "frozen" in kinds,
        "pipeline_plain": "plain" in kinds,
        "pipeline_steps": case.steps > 1,
        "pipeline_accumulate": case.accumulate,
        "pipeline_recompute": case.recompute,
        "pipeline_dropout": "dropout" in kinds,
        "pipeline_sharded": case.update == "sharded",
        "pipeline_refuses": case.invalid in ("no_micro_batches", "small_batch", "chunks"),
        "pipeline_refuses_borders": case.invalid in ("shape", "dtype"),
        "pipeline_raises": case.invalid == "raises",
    }


_SIMPLER = Simpler(
    PipelineCase,
    ("axis", "blocks", "depths", "widths", "sizes", "length", "counts", "steps", "chunks"),
    _measure,
    within,
)
