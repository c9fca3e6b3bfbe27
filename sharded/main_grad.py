"""Gradients accumulated in fp32 beside low-precision parameters.

A bf16 parameter's ``.grad`` rounds after every micro-batch. With ``main_grad`` a buffer of fp32 (fp64 for fp64) hangs
on the parameter, backward adds to it directly, in its precision, and ``.grad`` stays None (mixed precision training,
arXiv 1710.03740; gradient accumulation fusion in Megatron-LM).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from sharded.autograd import apply


def attach(parameter: torch.Tensor) -> torch.Tensor:
    """Gives the parameter a buffer of zeros, [its shape]; one that it has stays. Returns the buffer."""
    if buffer_of(parameter) is None:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        parameter.main_grad = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)  # type: ignore[attr-defined]
    return require(parameter)


def buffer_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The parameter's buffer, if it has one."""
    found: torch.Tensor | None = getattr(parameter, "main_grad", None)
    return found


def require(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's buffer. Raises ValueError where it has none."""
    found = buffer_of(parameter)
    if found is None:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has no main_grad to accumulate in: expected a buffer; "
            "call sharded.main_grad.attach(parameter) first"
        )
    return found


def add_product(parameter: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
    """Adds a linear weight's gradient, [out, in], of grad [..., out] and x [..., in], to its buffer."""
    buffer = require(parameter)
    buffer.addmm_(rows(grad).to(buffer.dtype).T, rows(x).to(buffer.dtype))


def add_sum(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    """Adds a bias' gradient, [out], of grad [..., out], to its buffer."""
    buffer = require(parameter)
    buffer.add_(rows(grad).to(buffer.dtype).sum(0))


def rows(x: torch.Tensor) -> torch.Tensor:
    """[..., features] as [tokens, features]. Flattened, as a reshape to -1 cannot count the tokens of no features."""
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def add_bias(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x + bias, x [..., out]; the bias' gradient goes to its buffer."""
    return apply(AddBias, x, bias)


def returned(bias: torch.Tensor) -> torch.Tensor:
    """The bias for a caller that adds it; the gradient that the caller's addition gives goes to its buffer."""
    return apply(Returned, bias)


def widened(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter in its buffer's precision, for elementwise use; its gradient goes to the buffer."""
    return apply(Widened, parameter)


class AddBias(torch.autograd.Function):
    """[..., out], [out] -> [..., out]"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.bias = bias
        return x + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.needs_input_grad[1]:
            add_sum(ctx.bias, grad)
        return grad, None


class Returned(torch.autograd.Function):
    """[out] -> [out]"""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor) -> torch.Tensor:
        ctx.bias = bias
        return bias.view_as(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        add_sum(ctx.bias, grad)


class Widened(torch.autograd.Function):
    """[...] -> [...]"""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        ctx.parameter = parameter
        return parameter.to(require(parameter).dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        require(ctx.parameter).add_(grad)
