"""Candidates that leave ranks blocked."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from right import Right


class ExtraCollectiveOnRank0(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        if self.rank == 0:
            dist.all_reduce(torch.ones(3), group=self.tp)
        return y


class Sleeps(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        time.sleep(600)


class Spins(Right):
    """Never still, so that the deadline ends it."""

    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        while True:
            pass
