"""Candidates that say how their tensors lie: rightly, in every argument; or by a name that there is not."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from right import Right

from harness import Each, Partial, Sharded, Split, Whole
from reference.linear import LinearCase


class Usual(Right):
    """What the subject expects anyhow."""

    def built(self, made: Sharded) -> Any:
        made.inputs = {"input": Whole()}
        made.outputs = {"output": Split(-1, "tp")}
        return made


class WithEach(Right):
    """The same, with the axes of the replicas written out."""

    def column_linear(self, case: LinearCase) -> Any:
        made = super().column_linear(case)
        made.outputs = {"output": (Each(case.replica_axes), Split(-1, "tp"))}
        made.grads = {"weight": (Each(case.replica_axes), Split(0, "tp")), "bias": Split(0, "tp")}
        return made


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class PartialInput(Right):
    """Takes parts of its input that sum to it; their gradients are whole, and so not the sum of anything."""

    def built(self, made: Sharded) -> Any:
        right = made.forward
        made.forward = lambda x: right(_Sum.apply(x, self.tp))
        made.inputs = {"input": Partial("tp")}
        return made


class SummedLater(Right):
    """Leaves the sum of the input's gradient to its caller."""

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def column_linear(self, case: LinearCase) -> Any:
        made = super().column_linear(case)
        made.grads = {**made.grads, "input": Partial("tp")}
        return made


class PartialOutput(Right):
    """Every rank returns its features among zeros: they sum to the output."""

    def built(self, made: Sharded) -> Any:
        right = made.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            y, n, at = right(x), self.tp.size(), dist.get_rank(self.tp)
            return torch.cat([y if i == at else torch.zeros_like(y) for i in range(n)], dim=-1)

        made.forward = forward
        made.outputs = {"output": Partial("tp")}
        return made


class Gathered(Right):
    """Gathers its output, which the case did not ask for, and says so."""

    def built(self, made: Sharded) -> Any:
        right = made.forward
        made.forward = lambda x: _Gather.apply(right(x), self.tp)
        made.outputs = {"output": Whole()}
        return made


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(y) for _ in range(group.size())]
        dist.all_gather(parts, y.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.chunk(ctx.group.size(), dim=-1)[dist.get_rank(ctx.group)], None


class GradientOverReplicas(Right):
    """Says that the gradient is a sum over dp, whose ranks have gradients of their own."""

    def built(self, made: Sharded) -> Any:
        made.grads = {"weight": (Split(0, "tp"), Partial("dp")), "bias": Split(0, "tp")}
        return made


class Misspelt(Right):
    arguments: ClassVar[dict[str, Any]]

    def built(self, made: Sharded) -> Any:
        layouts = {"weight": Split(0, "tp"), "bias": Split(0, "tp")}
        return Sharded(made.module, forward=made.forward, **{**layouts, **self.arguments})


class MisspeltLayout(Misspelt):
    arguments: ClassVar = {"wieght": Split(0, "tp")}


class MisspeltGradient(Misspelt):
    arguments: ClassVar = {"grads": {"biass": Partial("tp")}}


class MisspeltInput(Misspelt):
    arguments: ClassVar = {"inputs": {"x": Whole()}}


class MisspeltOutput(Misspelt):
    arguments: ClassVar = {"outputs": {"out": Split(-1, "tp")}}


class MisspeltParameter(Misspelt):
    arguments: ClassVar = {"parameters": {"wt": torch.zeros(1)}}


class _Unsaid(Right):
    def column_linear(self, case: LinearCase) -> Any:
        made = super().column_linear(case)
        return Sharded(made.module, forward=made.forward, **made.layouts)


class PartialInputUnsaid(_Unsaid, PartialInput):
    pass


class SummedLaterUnsaid(_Unsaid, SummedLater):
    pass


class PartialOutputUnsaid(_Unsaid, PartialOutput):
    pass


class GatheredUnsaid(_Unsaid, Gathered):
    pass
