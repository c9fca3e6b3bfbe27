"""Schedules that are handed back in all ways, right and wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness import Candidate, NotOffered, PipelineSchedule
from reference.schedule import Action, ScheduleCase


def orders(case: ScheduleCase) -> list[list[Action]]:
    """1F1B, without messages."""
    if case.kind != "1f1b":
        raise NotOffered("1F1B only")

    def of_rank(rank: int) -> list[Action]:
        m = case.micro_batches
        ahead = min(m, case.stages - rank)
        found = [Action("forward", k) for k in range(ahead)]
        for k in range(ahead, m):
            found += [Action("backward", k - ahead), Action("forward", k)]
        return found + [Action("backward", k) for k in range(m - ahead, m)]

    return [of_rank(rank) for rank in range(case.stages)]


class Right(Candidate):
    supports = ("schedule_1f1b_few",)

    def schedule(self, case: ScheduleCase) -> Any:
        return PipelineSchedule(orders(case), receives="none")


class ListsAlone(Right):
    """Which are taken to have messages."""

    def schedule(self, case: ScheduleCase) -> Any:
        return orders(case)


class NoneAtAll(Right):
    def schedule(self, case: ScheduleCase) -> Any:
        return None


class NoLists(Right):
    def schedule(self, case: ScheduleCase) -> Any:
        return 3


class NoActions(Right):
    def schedule(self, case: ScheduleCase) -> Any:
        return [["forward"]] * case.stages


class Misplaced(Right):
    def schedule(self, case: ScheduleCase) -> Any:
        return PipelineSchedule(orders(case), placement=((0,),) * case.stages, receives="none")


class Raises(Right):
    def schedule(self, case: ScheduleCase) -> Any:
        raise RuntimeError("no such luck")


class Uncounted(Right):
    """The warm-up takes one micro-batch for each stage, whether there are so many or not."""

    def schedule(self, case: ScheduleCase) -> Any:
        found = orders(case)
        for rank, actions in enumerate(found):
            actions += [Action("backward", k) for k in range(case.micro_batches, case.stages - rank)]
        return PipelineSchedule(found, receives="none")


class Misspelt(Right):
    """What its receives do is none of the words for it."""

    def schedule(self, case: ScheduleCase) -> Any:
        return PipelineSchedule(orders(case), receives="waits")  # type: ignore[arg-type]


class MessagesThoughNone(Right):
    def schedule(self, case: ScheduleCase) -> Any:
        found = orders(case)
        found[1].insert(0, Action("recv_forward", 0))
        return PipelineSchedule(found, receives="none")


class Text(Right):
    def schedule(self, case: ScheduleCase) -> Any:
        return "F0 F1 B0"


class Numpy(Right):
    """Numbers of another library."""

    def schedule(self, case: ScheduleCase) -> Any:
        found = [[Action(a.kind, np.int64(a.micro_batch), np.int32(a.chunk)) for a in one] for one in orders(case)]  # type: ignore[arg-type]
        return PipelineSchedule(found, receives="none")


class Backwards(Right):
    """The last rank has the first stage."""

    def schedule(self, case: ScheduleCase) -> Any:
        placement = tuple((stage,) for stage in range(case.stages))[::-1]
        return PipelineSchedule(orders(case)[::-1], placement=placement, receives="none")


class AllForwardsFirst(Right):
    def schedule(self, case: ScheduleCase) -> Any:
        kinds: Any = ("forward", "backward")
        actions = [Action(kind, k) for kind in kinds for k in range(case.micro_batches)]
        return PipelineSchedule([actions] * case.stages, receives="none")
