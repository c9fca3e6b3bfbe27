"""The feed-forward half of a transformer layer: cut along its inner width (Megatron-LM, arXiv 1909.08053, section 3).

The activation is elementwise, so each rank applies it to its own columns: one all-reduce forward and one backward, or
under sequence parallelism a gather and a reduce-scatter. The two inputs of a gated unit share one gather.

Legend: S positions (s where sequence parallelism cuts them), B sequences, H hidden, F ffn (f this rank's part).
"""

from __future__ import annotations

from typing import Literal, TypeAlias, Unpack

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn

from sharded.initialization import derived_seed
from sharded.linear import ColumnParallelLinear, RowParallelLinear, shared_columns
from sharded.parallel_linear import BlockOptions
from sharded.process_groups import default_group

Activation: TypeAlias = Literal["gelu", "swiglu"]
ACTIVATIONS: tuple[Activation, ...] = ("gelu", "swiglu")


class MLP(nn.Module):
    """gelu: down(gelu(up(x))), with the exact GELU. swiglu: down(silu(gate(x)) * up(x)) (arXiv 2002.05202).

    forward: [S, B, H] -> [S, B, H]; sequence_parallel: [s, B, H] -> [s, B, H]. Options: see ParallelLinear.

    Raises ValueError for an unknown activation or a width that the group's size does not divide.
    """

    gate: ColumnParallelLinear | None

    def __init__(
        self, hidden: int, ffn: int, *, activation: Activation = "gelu", seed: int = 0, **options: Unpack[BlockOptions]
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}")
        group = options.get("group") or default_group()
        if ffn % group.size():
            raise ValueError(
                f"ffn={ffn} over {group.size()} ranks: expected a width that their number divides; change ffn or use "
                "a smaller group"
            )

        def column(name: str) -> ColumnParallelLinear:
            return ColumnParallelLinear(hidden, ffn, seed=derived_seed(seed, name), **options)

        self.gate = column("gate") if activation == "swiglu" else None
        self.up = column("up")
        self.down = RowParallelLinear(ffn, hidden, seed=derived_seed(seed, "down"), **options)

    def forward(self, x: torch.Tensor, *, sequence_length: int | None = None) -> torch.Tensor:
        if self.gate is None:
            (up,) = shared_columns(x, (self.up,), sequence_length=sequence_length)
            inner = F.gelu(up)
        else:
            gate, up = shared_columns(x, (self.gate, self.up), sequence_length=sequence_length)
            inner = F.silu(gate) * up
        y: torch.Tensor = self.down(inner)
        return y
