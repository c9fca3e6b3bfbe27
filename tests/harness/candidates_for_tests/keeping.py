"""Layers that keep something too long, or in too low a precision."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from harness import Sharded
from harness.candidates.builtin import Builtin
from reference.collectives import CollectivesCase
from reference.embedding import EmbeddingCase


class _Sum(torch.autograd.Function):
    """Into a buffer for each shape, which is the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, buffers: dict[Any, torch.Tensor]) -> torch.Tensor:
        buffer = buffers.setdefault((x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype))
        buffer.copy_(x)
        dist.all_reduce(buffer, group=group)
        return buffer.view_as(buffer)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None, None


class OneBufferForEachShape(Builtin):
    def collective(self, case: CollectivesCase) -> Sharded:
        made, buffers = super().collective(case), dict[Any, torch.Tensor]()
        if case.kind == "reduce" and case.parallel_size > 1:
            made.forward = lambda x: _Sum.apply(x, self.groups.group(case.axis), buffers)
        return made


class MainGradientInTheDtype(Builtin):
    def embedding(self, case: EmbeddingCase) -> Sharded:
        made = super().embedding(case)

        def finish() -> None:
            total = getattr(made.module.weight, "main_grad", None)
            if total is not None:
                total.copy_(total.to(case.format.torch_dtype))

        made.finish = finish
        return made
