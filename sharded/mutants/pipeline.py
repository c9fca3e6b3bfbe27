"""Faults in pipelines: schedules that wait for what never comes."""

from __future__ import annotations

from sharded import pipeline_schedules
from sharded.mutants import Mutant, Patch


def _ahead_of_micro_batches() -> list[Patch]:
    def forwards_ahead(stages: int, rank: int, micro_batches: int) -> int:
        return stages - rank

    return [(pipeline_schedules, "forwards_ahead", forwards_ahead)]


MUTANTS = (
    Mutant(
        "F50",
        "pipeline",
        "warm-up count without min(.., m): hangs for m < p",
        "pytorch/torchtitan#775",
        _ahead_of_micro_batches,
    ),
)
