"""Layers that are right for one micro-batch at a time, and keep something that another one overwrites or misses."""

from __future__ import annotations

from typing import Any

import torch
from right import Right

from harness import Sharded
from reference.linear import LinearCase


class _InputOnModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, held: dict[str, torch.Tensor]) -> torch.Tensor:
        ctx.held = held
        held["x"], held["weight"] = x, weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.held["x"], ctx.held["weight"]
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2), None


class InputOnModule(Right):
    """Saves its input in a place of the module, and not for the backward that needs it."""

    def built(self, made: Sharded) -> Any:
        made.forward = lambda x: _InputOnModule.apply(self.summed(x), made.module.weight, {}) + made.module.bias
        return made


class InputOnModuleShared(InputOnModule):
    def built(self, made: Sharded) -> Any:
        held: dict[str, torch.Tensor] = {}
        made.forward = lambda x: _InputOnModule.apply(self.summed(x), made.module.weight, held) + made.module.bias
        return made


class OutputBuffer(Right):
    """Writes every output to the same memory."""

    def built(self, made: Sharded) -> Any:
        right, kept = made.forward, []

        def forward(x: torch.Tensor) -> torch.Tensor:
            y = right(x)
            kept.append(y)
            with torch.no_grad():
                kept[0].copy_(y.detach())
            return y

        made.forward = forward
        return made


class ParameterInFinish(Right):
    """Takes a step that nobody asked for, after the last backward."""

    def built(self, made: Sharded) -> Any:
        def finish() -> None:
            with torch.no_grad():
                made.module.weight.add_(1)

        made.finish = finish
        return made


class WithoutGradients(Right):
    """Another code path where no gradients are needed, and wrong there."""

    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        return y if torch.is_grad_enabled() else 2 * y


class MainGradient(Right):
    """Gradients summed in an fp32 buffer, and ``kept`` says in which dtype really."""

    supports = ("main_grad",)
    kept: torch.dtype = torch.float32

    def column_linear(self, case: LinearCase) -> Any:
        made = super().column_linear(case)
        for parameter in made.module.parameters():
            wide = torch.promote_types(parameter.dtype, torch.float32)
            parameter.main_grad = torch.zeros(parameter.shape, dtype=wide)
            kept = torch.promote_types(parameter.dtype, self.kept)

            def add(p: Any, kept: torch.dtype = kept) -> None:
                p.main_grad.copy_(p.main_grad.to(kept) + p.grad.to(kept))
                p.grad = None

            if case.main_grad:
                parameter.register_post_accumulate_grad_hook(add)
        return made


class MainGradientInBf16(MainGradient):
    kept = torch.bfloat16
