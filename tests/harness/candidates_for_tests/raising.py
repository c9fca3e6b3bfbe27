"""Candidates that raise, on every rank or on one."""

from __future__ import annotations

from typing import Any

import torch
from right import Right

from harness import Mesh, Sharded


class InConstruction(Right):
    def __init__(self) -> None:
        raise RuntimeError("no licence")


class InOpen(Right):
    def open(self, mesh: Mesh) -> None:
        super().open(mesh)
        if mesh.axis_size("tp") == 2:
            raise RuntimeError("no groups today")


class InActivate(Right):
    def activate(self) -> None:
        raise RuntimeError("cannot be current")


class InBuild(Right):
    def built(self, made: Sharded) -> Any:
        raise KeyError("hidden_size")


class InForward(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        raise ValueError("forward says no\nand more")


class InForwardOnRank1(Right):
    """Rank 0 goes on, into an all-reduce that rank 1 never joins."""

    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        if self.rank == 1:
            raise ValueError("forward says no")
        return y


class Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise ArithmeticError("backward says no")


class InBackward(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        return Refuse.apply(y)


class InBackwardOnRank1(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        return Refuse.apply(y) if self.rank == 1 else y


class InFinish(Right):
    def built(self, made: Sharded) -> Any:
        made.finish = lambda: [][0]
        return made


class Exits(Right):
    """SystemExit is no way out of a rank."""

    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        raise SystemExit(0)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message either")


class WithoutMessage(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        raise Unprintable


class Deep(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        return self.output(y, x)
