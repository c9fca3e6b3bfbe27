"""How a candidate presents a pipeline schedule: lists of actions, and how they are meant."""

from __future__ import annotations

from collections.abc import Sequence

from reference.schedule import Action, Placement, Receives


class PipelineSchedule:
    """What each rank of a pipeline does, in order: ``PipelineSchedule(lists)``, one list of actions a rank.

    actions: of `Action`, or of any objects with its attributes ``kind``, ``micro_batch`` and ``chunk``.
    placement: the stages of each rank, by chunk, where they are not placed as is usual for the kind:
        ``((0, 3), (1, 2))`` for a V over two ranks.
    receives: what a receive in the lists does. It waits for its message (``wait``); it is posted, and what computes
        with the message waits (``posted``); or the lists name no messages (``none``), only what is computed.
    """

    def __init__(
        self,
        actions: Sequence[Sequence[Action]],
        *,
        placement: Placement | None = None,
        receives: Receives = "wait",
    ) -> None:
        self.actions = actions
        self.placement = placement
        self.receives = receives
