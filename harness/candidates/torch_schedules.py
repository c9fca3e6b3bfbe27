"""The schedules of torch.distributed.pipelining, as it lists them: no stage is built and nothing runs.

Its schedules of several stages a rank make lists with sends and receives, which its runtime executes: a receive is
posted, and what computes with the message waits. GPipe and 1F1B list only what is computed; their own loops, which
run them, do not read these lists.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from harness.candidate import NotOffered
from harness.schedule import PipelineSchedule
from reference.schedule import Action, ActionKind, ScheduleCase

FEATURES = (
    "schedule_gpipe",
    "schedule_gpipe_chunks",
    "schedule_interleaved",
    "schedule_interleaved_few",
    "schedule_interleaved_uneven",
    "schedule_interleaved_zero_bubble",
    "schedule_zbv",
    "schedule_dualpipev",
)

_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
#: By the letters of its actions; others (unshard, reduce the gradient ...) compute and send nothing of the pipeline.
_KINDS: dict[str, ActionKind] = {
    "F": "forward",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weight",
    "RECV_F": "recv_forward",
    "SEND_F": "send_forward",
    "RECV_B": "recv_backward",
    "SEND_B": "send_backward",
}


def schedule(case: ScheduleCase) -> PipelineSchedule:
    """What torch lists for the case. Raises NotOffered where this version has no such schedule, or refuses it."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    name = "ScheduleLoopedBFS" if case.kind == "gpipe" and case.chunks > 1 else _CLASSES[case.kind]
    kind: Any = getattr(pipelining, name, None) or getattr(schedules, name, None)
    if kind is None:
        raise NotOffered(f"this version of torch has no {name}")
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    stages = [_stage(case, stages) for stages in case.placement[0]]
    try:
        made = kind(stages[0] if single else stages, case.micro_batches)
    except ValueError as error:  # of its constructors: counts that it does not take
        raise NotOffered(f"{name} does not take so many micro-batches") from error
    order = made.pipeline_order if single else made.pipeline_order_with_comms
    if order is None:
        raise NotOffered(f"{name} of this version of torch lists no actions")
    placement = case.placement if single else _placement(case, made.stage_index_to_group_rank)
    actions = [
        [
            Action(_KINDS[part.computation_type.value], part.microbatch_index, placement[rank].index(part.stage_index))
            for action in order[rank]
            if action is not None
            for part in getattr(action, "sub_actions", None) or (action,)
            if part.computation_type.value in _KINDS
        ]
        for rank in range(case.stages)
    ]
    return PipelineSchedule(actions, placement=placement, receives="none" if single else "posted")


def _placement(case: ScheduleCase, rank_of: dict[int, int]) -> tuple[tuple[int, ...], ...]:
    ranks = range(case.stages)
    return tuple(tuple(stage for stage in sorted(rank_of) if rank_of[stage] == rank) for rank in ranks)


def _stage(case: ScheduleCase, stage: int) -> Any:
    """What the constructors look at of the first rank's stages: from them they make the lists of all ranks."""
    last = case.stages * case.chunks - 1
    return SimpleNamespace(
        stage_index=stage,
        num_stages=last + 1,
        group_size=case.stages,
        group_rank=0,
        is_first=stage == 0,
        is_last=stage == last,
        submod=None,
    )
