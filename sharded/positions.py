"""Learned position embeddings, added to the tokens' (arXiv 1706.03762, section 3.5).

The table is replicated. Under sequence parallelism a rank adds the piece of its own tokens: the table is marked, and
`sequence_parallel.finish_sequence_parallel_gradients` sums its gradient.

Legend: P positions in the table, S of a batch (s where sequence parallelism cuts them), B sequences, H hidden.
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import nn

from sharded.cut import piece
from sharded.initialization import initial
from sharded.main_grad import attach, widened
from sharded.parallel_linear import PartOptions
from sharded.process_groups import default_group
from sharded.sequence_parallel import mark


class Positions(nn.Module):
    """``weight`` [P, H]. Options: see ParallelLinear."""

    def __init__(self, positions: int, hidden: int, *, seed: int = 0, **options: Unpack[PartOptions]) -> None:
        super().__init__()
        self.group = options.get("group") or default_group()
        self.sequence_parallel = options.get("sequence_parallel", False)
        self.main_grad = options.get("main_grad", False)
        values = initial(
            "weight",
            (positions, hidden),
            None,
            self.group,
            init=options.get("init", "full"),
            seed=seed,
            bound=1 / math.sqrt(hidden),
            dtype=options.get("dtype") or torch.get_default_dtype(),
        )
        self.weight = nn.Parameter(values.to(options.get("device") or torch.get_default_device()))
        if self.sequence_parallel:
            mark(self.weight)
        if self.main_grad:
            attach(self.weight)

    def forward(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """x [S, B, H], or [s, B, H] under sequence parallelism; length: S, at most P."""
        first, own = piece(length, self.group.size(), self.group.rank()) if self.sequence_parallel else (0, length)
        weight = widened(self.weight) if self.main_grad else self.weight
        added: torch.Tensor = (x + weight[first : first + own, None]).to(x.dtype)
        return added
