"""Candidates that change what they must leave alone."""

from __future__ import annotations

from typing import Any

import torch
from right import Right


class Input(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        with torch.no_grad():
            x.zero_()
        return y


class InputOnRank1(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        if self.rank == 1:
            with torch.no_grad():
                x.zero_()
        return y


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
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        torch.distributed.destroy_process_group()
        return y
