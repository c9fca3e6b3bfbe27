"""Candidates that end their process."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from right import Right


class Exit(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        os._exit(3)


class KilledOnRank1(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        return y
