"""From the order in which ranks compute to what they send and receive.

A send follows its computation at once. Receives follow the order in which the other rank sends, each as late as
possible: messages between two ranks then match without tags, also where both directions of the pipeline and several
chunks share them (two ranks with virtual stages). An earlier message of the same rank is on its way before the one
that is waited for, so that receiving it first never adds a wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from sharded.pipeline_actions import Action, Actions, Kind

#: (forward or backward, chunk, micro-batch).
Step = tuple[Literal["forward", "backward"], int, int]

_SEND: dict[str, Kind] = {"forward": "send_forward", "backward": "send_backward"}
_RECEIVE: dict[str, Kind] = {"forward": "recv_forward", "backward": "recv_backward"}


@dataclass(eq=False)
class _Channel:
    """What one rank sends to another, in order, as the steps that need it; and how much of it was received so far."""

    messages: list[Step] = field(default_factory=list)
    place: dict[Step, int] = field(default_factory=dict)
    received: int = 0

    def send(self, message: Step) -> None:
        self.place[message] = len(self.messages)
        self.messages.append(message)

    def until(self, message: Step) -> list[Step]:
        """What is to be received now, so that the message is there. One that nobody sends is waited for."""
        place = self.place.get(message)
        if place is None:
            return [message]
        before, self.received = self.received, max(self.received, place + 1)
        return self.messages[before : place + 1]


def with_messages(orders: Sequence[Sequence[Step]], chunks: int) -> tuple[Actions, ...]:
    """The actions of every rank that computes in these orders, one order a rank.

    The border between two stages of one rank takes no message.
    """
    ranks = len(orders)
    channels = {(a, b): _Channel() for a in range(ranks) for b in {(a - 1) % ranks, (a + 1) % ranks} - {a}}
    for rank, order in enumerate(orders):
        for kind, chunk, micro_batch in order:
            stage = _goes_to(kind, chunk * ranks + rank, ranks * chunks)
            if stage is not None and stage % ranks != rank:
                channels[rank, stage % ranks].send((kind, stage // ranks, micro_batch))
    return tuple(_of_rank(rank, order, ranks, chunks, channels) for rank, order in enumerate(orders))


def _of_rank(
    rank: int, order: Sequence[Step], ranks: int, chunks: int, channels: dict[tuple[int, int], _Channel]
) -> Actions:
    actions: list[Action] = []
    for step in order:
        kind, chunk, micro_batch = step
        stage = chunk * ranks + rank
        source, target = _comes_from(kind, stage, ranks * chunks), _goes_to(kind, stage, ranks * chunks)
        if source is not None and source % ranks != rank:
            actions += [Action(_RECEIVE[what], k, c) for what, c, k in channels[source % ranks, rank].until(step)]
        actions.append(Action(kind, micro_batch, chunk))
        if target is not None and target % ranks != rank:
            actions.append(Action(_SEND[kind], micro_batch, chunk))
    return tuple(actions)


def _goes_to(kind: str, stage: int, stages: int) -> int | None:
    """The stage that gets the result of a step; None at the end of the pipeline."""
    other = stage + 1 if kind == "forward" else stage - 1
    return other if 0 <= other < stages else None


def _comes_from(kind: str, stage: int, stages: int) -> int | None:
    """The stage whose result a step needs; None at the start of the pipeline."""
    return _goes_to("backward" if kind == "forward" else "forward", stage, stages)
