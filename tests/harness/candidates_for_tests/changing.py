"""Candidates that change what they must leave alone."""

from __future__ import annotations

from typing import Any

import torch
from right import Right

from harness import Sharded


class InputOnRank1(Right):
    """Behind autograd's back, which would otherwise refuse."""

    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        if self.rank == 1:
            x.data[0] += 1
        return y


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        before = grad.clone()
        grad.mul_(2)
        return before


class OutputGradient(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        return Double.apply(y)


class DefaultDtype(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        torch.set_default_dtype(torch.float64)
        return y


class Random(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        torch.rand(())
        return y


class GradMode(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        torch.set_grad_enabled(False)
        return y


class DefaultGroup(Right):
    """The next case needs other processes."""

    def built(self, made: Sharded) -> Any:
        made.finish = torch.distributed.destroy_process_group
        return made
