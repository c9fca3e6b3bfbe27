"""What must cross the borders between the ranks of a pipeline, and how many micro-batches a rank has in flight.

Shapes as in `reference.pipeline`.
"""

from __future__ import annotations

from collections import Counter

from reference import schedule_formulas
from reference.pipeline import PipelineCase
from reference.pipeline_stages import blocks_of, tied
from reference.schedule import ScheduleCase

#: From and to which coordinate along the axis, and in which dtype: elements.
Elements = Counter[tuple[int, int, str]]


def due(case: PipelineCase) -> Elements:
    """What one step sends: activations to the stage after, gradients of those that need one to the stage before."""
    found: Elements = Counter()
    dtype = str(case.format.torch_dtype).removeprefix("torch.")
    tokens = sum(case.sizes) * case.length
    for stage in range(1, case.stages):
        before, here = case.coordinate_of(stage - 1), case.coordinate_of(stage)
        if before == here:
            continue
        features = blocks_of(case, stage)[0].entering
        features += blocks_of(case, 0)[0].leaving if case.skip != "none" else 0
        found[before, here, dtype] += tokens * features
        found[here, before, dtype] += tokens * features
        if case.ids:
            found[before, here, "int64"] += tokens
    return found


def tied_elements(case: PipelineCase) -> tuple[set[int], int]:
    """The coordinates that hold a copy of the tied weight, and the elements of all copies."""
    copies = tied(case)
    return {case.coordinate_of(one.stage) for one in copies}, sum(one.entering * one.leaving for one in copies)


def most_in_flight(case: PipelineCase, coordinate: int) -> int | None:
    """The most micro-batches, over all stages of a rank, that are between forward and backward at one time; None where
    the schedule leaves it open. See `reference.schedule_formulas`."""
    asked = ScheduleCase(case.schedule, case.parallel_size, case.micro_batches, case.chunks)
    return schedule_formulas.most_in_flight(asked, coordinate)
