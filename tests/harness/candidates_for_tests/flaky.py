"""A candidate whose results depend on what ran before in the same processes."""

from __future__ import annotations

from typing import Any

import torch
from right import Right

from harness import Sharded


class SecondCase(Right):
    """Wrong from the second case with a bias on."""

    cases = 0

    def built(self, made: Sharded) -> Any:
        type(self).cases += 1
        return made

    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        return y + (type(self).cases > 1)
