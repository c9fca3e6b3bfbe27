"""What a rank did in a step of a pipeline, for whoever asks how much it waited and kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from sharded.pipeline_actions import Action


@dataclass
class Record:
    """One step of one rank.

    actions: in the order in which they were taken. in_flight: the most micro-batches, over all of its chunks, that were
    at one time between their forward and their backward. stored: the most bytes that autograd and the engine kept for
    them, with what was computed again; 0 where it was not measured.
    """

    actions: list[Action] = field(default_factory=list)
    in_flight: int = 0
    stored: int = 0

    def took(self, action: Action, in_flight: int, stored: int) -> None:
        self.actions.append(action)
        self.in_flight = max(self.in_flight, in_flight)
        self.stored = max(self.stored, stored)
