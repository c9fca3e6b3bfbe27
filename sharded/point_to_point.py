"""Carries schedules over process groups, several at a time, without a thread.

What is begun is on the wire with its first step, or with the check before it; the others follow when somebody waits.
Whoever waits ends first what was begun before: so ranks may wait in different orders and still do the same things in
the same order, and none waits for a rank that waits for it. Messages of one reduction have a tag of their own. A
backend that matches messages by their order alone, as NCCL does, carries one reduction after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from sharded.agreement import Agreement
from sharded.schedule import Exchange, Schedule

_TAGS = 1 << 15  # by then the first has long ended


class Lane:
    """What is in flight in one group, in the order of its beginning, and how many there were."""

    def __init__(self) -> None:
        self.begun = 0
        self.queue: deque[Handle] = deque()


# By the group itself: names are used again after destroy_process_group(), and not by the same ranks.
_lanes: WeakKeyDictionary[ProcessGroup, Lane] = WeakKeyDictionary()


def lane_of(group: ProcessGroup) -> Lane:
    """What is in flight in a group."""
    return _lanes.setdefault(group, Lane())


class Handle:
    """A reduction on its way. Every rank of the group must begin the same ones, in the same order, and wait for each
    in any order."""

    def __init__(
        self,
        schedule: Schedule,
        deliver: Callable[[], torch.Tensor],
        group: ProcessGroup,
        agreement: Agreement | None = None,
    ) -> None:
        self._schedule, self._deliver, self._group, self._agreement = schedule, deliver, group, agreement
        self._lane = lane_of(group)
        self._tag = self._lane.begun % _TAGS
        self._lane.begun += 1
        self._lane.queue.append(self)
        self._works: Sequence[Work] = ()
        self._error: Exception | None = None
        self.done = False
        if agreement is None and heeds_tags(group):
            self._next()

    def wait(self) -> torch.Tensor:
        """The result. Ends what was begun before in the group first.

        Raises ValueError, on every rank, where the ranks did not ask for the same; then everything that was begun has
        ended, so that a rank which waits for another one first is not left alone with it.
        """
        while not self.done:
            self._lane.queue[0].end()
        if self._error is not None:
            end_all(self._group)
            raise self._error
        return self._deliver()

    def end(self) -> None:
        """Step after step until it is done."""
        while not self.done:
            self.advance()

    def advance(self) -> None:
        """Waits for the messages that are on their way, and sends the next ones. What goes wrong is kept for whoever
        waits for this one."""
        try:
            if self._agreement is not None:
                agreement, self._agreement = self._agreement, None
                agreement.settle()
            wait_for(self._works)
            self._next()
        except Exception as error:
            self._error = error
            self._finished()

    def _next(self) -> None:
        try:
            with torch.no_grad():
                exchange = next(self._schedule)
        except StopIteration:
            self._finished()
        else:
            self._works = post(exchange, self._group, self._tag)

    def _finished(self) -> None:
        self.done = True
        self._lane.queue.remove(self)


def post(exchange: Exchange, group: ProcessGroup, tag: int) -> Sequence[Work]:
    """Puts the messages of a step on the wire, those without elements left out."""

    def operations(what: Callable[..., Work | None], messages: Sequence[tuple[int, torch.Tensor]]) -> list[dist.P2POp]:
        return [
            dist.P2POp(what, memory, dist.get_global_rank(group, peer), group, tag)
            for peer, memory in messages
            if memory.numel()
        ]

    all_of_them = [*operations(dist.irecv, exchange.receives), *operations(dist.isend, exchange.sends)]
    return dist.batch_isend_irecv(all_of_them) if all_of_them else ()


def wait_for(works: Sequence[Work]) -> None:
    """Waits for every message of a step, those that were sent too: their memory may be changed after that."""
    for work in works:
        work.wait()


def end_all(group: ProcessGroup) -> None:
    """Ends everything that is in flight in the group."""
    queue = lane_of(group).queue
    while queue:
        queue[0].end()


def heeds_tags(group: ProcessGroup) -> bool:
    """Whether messages of several reductions may travel side by side."""
    return dist.get_backend(group) == "gloo"


def together(handles: Sequence[Handle], group: ProcessGroup) -> list[torch.Tensor]:
    """Their results. They take their steps in turns, so that while one waits the others' messages travel."""
    while heeds_tags(group) and not all(handle.done for handle in handles):
        for handle in handles:
            if not handle.done:
                handle.advance()
    return [handle.wait() for handle in handles]
