"""Activation recomputation: keep a block's inputs, drop what is in between, compute it again in backward.

Dropout has to draw the same masks again, and the streams must afterwards be where the forward pass left them: the next
layer's masks would else depend on who recomputes (Megatron-LM, arXiv 2205.05198, section 5).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
import torch.utils.checkpoint as torch_checkpoint

from sharded.random import RandomTracker, States


def checkpoint(
    function: Callable[..., torch.Tensor], *arguments: torch.Tensor | None, tracker: RandomTracker
) -> torch.Tensor:
    """function(*arguments), whose saved tensors are computed again when backward first needs one.

    The whole function runs again, with its collectives. torch would by default stop after the last tensor that
    backward needs, which may be before a collective on one rank and after it on another.
    """
    replayed = Replayed(tracker, tracker.state())

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), replayed

    with torch_checkpoint.set_checkpoint_early_stop(False):
        result: torch.Tensor = torch_checkpoint.checkpoint(
            function, *arguments, use_reentrant=False, context_fn=contexts
        )
    return result


class Replayed:
    """The tracker's streams are where they were, and afterwards where they are now. May be entered again, as a graph
    that is retained is recomputed in every backward."""

    def __init__(self, tracker: RandomTracker, then: States) -> None:
        self._tracker, self._then = tracker, then
        self._now: States = {}

    def __enter__(self) -> None:
        self._now = self._tracker.state()
        self._tracker.load(self._then)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tracker.load(self._now)
