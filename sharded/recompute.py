"""Activation recomputation: keep a block's inputs, drop what is in between, compute it again in backward.

Dropout has to draw the same masks again, and the streams must afterwards be where the forward pass left them: the next
layer's masks would else depend on who recomputes (Megatron-LM, arXiv 2205.05198, section 5).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.autograd.function import once_differentiable

from sharded.autograd import apply
from sharded.random import RandomTracker, States


def checkpoint(function: Callable[..., torch.Tensor], *arguments: torch.Tensor, tracker: RandomTracker) -> torch.Tensor:
    """function(*arguments), which runs again, whole and with its collectives, where its backward begins.

    function: of tensors, with random numbers from the tracker or the default generator.
    """
    replayed = Replayed(tracker, tracker.state())

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), replayed

    def anchored(*arguments: torch.Tensor) -> torch.Tensor:
        return apply(Anchor, function(*arguments))

    result: torch.Tensor = torch_checkpoint.checkpoint(anchored, *arguments, use_reentrant=False, context_fn=contexts)
    return result


class Anchor(torch.autograd.Function):
    """[...] -> [...], whose backward wants a saved tensor.

    torch runs a function again from the first tensor that backward asks for to the last that forward saved. Where those
    are depends on the options: a bias, dropout. The anchor is both, so that the collectives come in one order.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _ = ctx.saved_tensors
        return grad


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
