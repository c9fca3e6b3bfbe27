"""Right values, and more or other traffic than the algebra needs."""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness.candidates.builtin import Builtin
from harness.module import Sharded
from reference.linear import LinearCase
from reference.transformer import TransformerCase


class Twice(Builtin):
    """Reduces something that nobody needs after the output."""

    def row_linear(self, case: LinearCase) -> Sharded:
        made, group = super().row_linear(case), self.groups.group(case.axis)
        inner = made.forward

        def forward(x: torch.Tensor) -> object:
            output = inner(x)
            dist.all_reduce(torch.zeros(3), group=group)
            return output

        made.forward = forward
        return made


class Declared(Twice):
    """Says that it does."""

    def traffic(self, case, needed):
        from reference.traffic import Transfer

        extra = [
            Transfer("forward", m, "all_reduce", case.axis, 3, "float32")
            for m in range(len(case.leading))
            if case.parallel_size > 1
        ]
        return [*needed, *extra]


class Layer(Builtin):
    """A transformer layer that reduces something more."""

    def transformer_layer(self, case: TransformerCase) -> Sharded:
        made, group = super().transformer_layer(case), self.groups.group(case.axis)
        inner = made.forward

        def forward(x: torch.Tensor) -> object:
            dist.all_reduce(torch.zeros(3, dtype=x.dtype), group=group)
            return inner(x)

        made.forward = forward
        return made
