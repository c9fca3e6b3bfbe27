"""Candidates whose layer holds weight and bias in one tensor, in the cases with a bias: [in + 1, out], the last row the
bias, so that both are cut out of it, and the weight is transposed too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from right import Right

from harness import NotOffered, PartOf, Sharded, Split
from reference.linear import LinearCase

Take = Callable[[torch.Tensor], Any]


class Fused(Right):
    """Right. `parts` is for those that misbehave."""

    def column_linear(self, case: LinearCase) -> Any:
        if not case.bias:
            return super().column_linear(case)
        if case.weight_requires_grad != case.bias_requires_grad and self.refuses():
            raise NotOffered("weight and bias are one tensor")
        size = case.out_features // self.tp.size()
        fused = torch.nn.Parameter(torch.zeros(case.in_features + 1, size, dtype=case.format.torch_dtype))

        def forward(x: torch.Tensor) -> torch.Tensor:
            return self.product(self.summed(x), fused)

        weight, bias = self.parts()
        return Sharded(
            torch.nn.Module(),
            forward=forward,
            parameters={"weight": PartOf(fused, weight), "bias": PartOf(fused, bias)},
            read_grad=self.gradient,
            weight=Split(0, "tp"),
            bias=Split(0, "tp"),
        )

    def refuses(self) -> bool:
        return True

    def parts(self) -> tuple[Take, Take]:
        return (lambda w: w[:-1].T), (lambda w: w[-1])

    def product(self, x: torch.Tensor, fused: torch.Tensor) -> torch.Tensor:
        return x @ fused[:-1] + fused[-1]

    def gradient(self, fused: torch.Tensor) -> torch.Tensor | None:
        return fused.grad


class TrainsApart(Fused):
    def refuses(self) -> bool:
        return False


class Overlapping(Fused):
    def parts(self) -> tuple[Take, Take]:
        return (lambda w: w[1:].T), (lambda w: w[-1])


class WrongShape(Fused):
    def parts(self) -> tuple[Take, Take]:
        return (lambda w: w[:-1]), (lambda w: w[-1])


class Calculating(Fused):
    def parts(self) -> tuple[Take, Take]:
        return (lambda w: w[:-1].T), (lambda w: w[-1].float())


class Repeating(Fused):
    def parts(self) -> tuple[Take, Take]:
        return (lambda w: w[:-1].T), (lambda w: w[-1, :1].expand(w.shape[1]))


class NoTensor(Fused):
    def parts(self) -> tuple[Take, Take]:
        return (lambda w: w[:-1].T), (lambda w: None)


class Raising(Fused):
    def parts(self) -> tuple[Take, Take]:
        return (lambda w: w[:-1].T), (lambda w: w[7])


class ColumnsSwapped(Fused):
    """The layer takes the features of its bias in another order than its adapter says."""

    def parts(self) -> tuple[Take, Take]:
        return (lambda w: w[:-1].T), (lambda w: w[-1].flip(0))


class DoubledBias(Fused):
    def product(self, x: torch.Tensor, fused: torch.Tensor) -> torch.Tensor:
        return x @ fused[:-1] + 2 * fused[-1]


class Writing(Fused):
    def product(self, x: torch.Tensor, fused: torch.Tensor) -> torch.Tensor:
        y = super().product(x, fused)
        fused.data[-1] += 1
        return y


class OtherGradient(Fused):
    def gradient(self, fused: torch.Tensor) -> torch.Tensor | None:
        return None if fused.grad is None else fused.grad[:-1]
