"""A candidate that is right. The misbehaving ones in the files beside this one change one thing, in cases with a bias
only, so that a test sees the next case run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from harness import Candidate, Mesh, Sharded, Split, new_group
from reference.linear import LinearCase


class SumGradient(torch.autograd.Function):
    """Every rank's output depends on the input, so the input's gradient is a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Right(Candidate):
    """A column layer and the groups of axes; `opened`, `build` and `output` are for those that misbehave."""

    def open(self, mesh: Mesh) -> None:
        self.mesh, self.rank = mesh, dist.get_rank()
        self.tp = new_group(mesh, "tp")

    def column_linear(self, case: LinearCase) -> Any:
        size = case.out_features // self.tp.size()
        layer = torch.nn.Linear(case.in_features, size, bias=case.bias, dtype=case.format.torch_dtype)

        def forward(x: torch.Tensor) -> Any:
            y = layer(self.summed(x))
            return self.output(y, x) if case.bias else y

        made = Sharded(layer, forward=forward, weight=Split(0, "tp"), bias=Split(0, "tp"))
        return self.built(made) if case.bias else made

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = SumGradient.apply(x, self.tp)
        return y

    def built(self, made: Sharded) -> Any:
        return made

    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        return y
