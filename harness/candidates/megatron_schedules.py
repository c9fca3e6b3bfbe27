"""The schedules of Megatron-Core, from the tables that its engine and its CUDA graphs are driven by.

They say only what is computed. Its interleaved schedule takes groups of N micro-batches
(``microbatch_group_size_per_vp_stage``), as many in each but the last, which may hold fewer, though not fewer than
there are ranks: here N is the smallest that fits.
"""

from __future__ import annotations

import importlib.util
import warnings
from types import SimpleNamespace

from harness.candidate import NotOffered
from harness.schedule import PipelineSchedule
from reference.schedule import Action, ScheduleCase

if importlib.util.find_spec("megatron") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Transformer Engine and APEX, which CPU ranks do without
        from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
        from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order

FEATURES = ("schedule_1f1b_few", "schedule_interleaved", "schedule_interleaved_uneven")


def schedule(case: ScheduleCase) -> PipelineSchedule:
    """What it computes for the case, in order. Raises NotOffered for counts that it refuses."""
    group = case.micro_batches if case.kind == "1f1b" else _group(case)
    if case.kind == "interleaved" and case.stages == 1:
        raise NotOffered("its interleaved schedule is for at least two ranks")
    table = get_schedule_table(case.micro_batches, case.chunks, group)
    return PipelineSchedule([_of_rank(case, rank, group, table) for rank in range(case.stages)], receives="none")


def _of_rank(case: ScheduleCase, rank: int, group: int, table: list[tuple[int, int]]) -> list[Action]:
    ranks = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: case.stages, rank=lambda: rank),
        virtual_pipeline_model_parallel_size=None if case.kind == "1f1b" else case.chunks,
    )
    _, _, warm_up, _ = get_pp_rank_microbatches(case.micro_batches, case.chunks, group, p2p_communicator=ranks)
    # Chunks from 1, those of backwards negative; micro-batches follow the table in both directions.
    forwards, backwards, actions = iter(table), iter(table), []
    for chunk in convert_schedule_table_to_order(warm_up, case.chunks, table):
        micro_batch, _ = next(forwards if chunk > 0 else backwards)
        actions.append(Action("forward" if chunk > 0 else "backward", micro_batch, abs(chunk) - 1))
    return actions


def _group(case: ScheduleCase) -> int:
    """The smallest number in a group with which all groups hold as many micro-batches as there are ranks."""
    p, m = case.stages, case.micro_batches
    least = next((n for n in range(p, m + 1) if m % n == 0 or m % n >= p), None)
    if least is None:
        raise NotOffered("its interleaved schedule does not take so few micro-batches")
    if least > -(-m // (m // p)):
        raise NotOffered("its groups are larger than they need be for so many micro-batches, and more is in flight")
    return least
