"""Differentiable collectives, and reductions from point-to-point sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from harness.module import Sharded
from reference.all_reduce import AllReduceCase
from reference.collectives import CollectivesCase
from reference.traffic import Transfer
from sharded import agreement, collectives
from sharded import all_reduce as reductions
from sharded.process_groups import ProcessGroups


def collective(case: CollectivesCase, groups: ProcessGroups) -> Sharded:
    group, dim = groups.group(case.axis), case.dim
    # One call a tensor: an uneven cut cannot be told from the rank's own piece.
    lengths = iter(shape[dim] for shape in case.shapes)
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "copy": lambda x: collectives.copy_to_group(x, group),
        "reduce": lambda x: collectives.reduce_from_group(x, group),
        "scatter": lambda x: collectives.scatter_to_group(x, group, dim),
        "gather": lambda x: collectives.gather_from_group(x, group, dim, next(lengths)),
        "gather_sequence": lambda x: collectives.gather_sequence(x, group, dim, next(lengths)),
        "reduce_scatter": lambda x: collectives.reduce_scatter_to_group(x, group, dim),
    }
    return Sharded(functions[case.kind])


def all_reduce(case: AllReduceCase, groups: ProcessGroups) -> Sharded:
    group, n = groups.group(case.axis), len(case.shapes)
    once: dict[str, Any] = {"check": case.check}
    reduced = {**once, "reduction": case.asks, "accumulate_fp32": case.accumulate_fp32}
    options = {**reduced, "algorithm": case.algorithm, "in_place": case.in_place}

    def handles(*tensors: torch.Tensor) -> list[torch.Tensor]:
        begun = [reductions.start_all_reduce(x, group, **options) for x in tensors]
        # Every second rank waits for the last one first.
        order = begun[::-1] if group.rank() % 2 else begun
        found = [handle.wait() for handle in order]
        return found[::-1] if group.rank() % 2 else found

    if case.operation == "reduce_scatter":
        return Sharded(lambda *tensors: [reductions.reduce_scatter(x, group, **reduced) for x in tensors])
    if case.operation == "all_gather":
        lengths = case.lengths
        return Sharded(
            lambda *tensors: [reductions.all_gather(tensors[m], group, lengths[m], **once) for m in range(n)]
        )
    if case.calls == "handles":
        return Sharded(handles)
    return Sharded(lambda *tensors: reductions.all_reduce_buckets(tensors, group, **options))


def with_agreement(case: AllReduceCase, needed: Sequence[Transfer]) -> Sequence[Transfer]:
    """The ranks agree first: once for all tensors of one call."""
    if not case.check or case.parallel_size == 1:
        return needed
    calls = 1 if case.operation == "all_reduce" and case.calls == "together" else len(case.shapes)
    agree = Transfer("forward", 0, "all_gather", case.axis, agreement.ROW, "int64")
    return [*needed, *[agree] * calls]
