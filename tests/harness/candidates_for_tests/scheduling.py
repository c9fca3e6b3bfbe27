"""Schedules that are handed back in all ways, right and wrong."""

from __future__ import annotations

from typing import Any

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


class AllForwardsFirst(Right):
    def schedule(self, case: ScheduleCase) -> Any:
        kinds: Any = ("forward", "backward")
        actions = [Action(kind, k) for kind in kinds for k in range(case.micro_batches)]
        return PipelineSchedule([actions] * case.stages, receives="none")
