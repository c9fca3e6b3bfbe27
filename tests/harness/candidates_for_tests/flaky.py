"""Candidates whose results depend on what ran before in the same processes."""

from __future__ import annotations

from typing import Any

import torch
from right import Right


class SecondCall(Right):
    """Wrong from the second case with a bias on."""

    calls = 0

    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        type(self).calls += 1
        return y + (type(self).calls > 1)
