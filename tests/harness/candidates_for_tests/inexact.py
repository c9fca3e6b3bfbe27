"""Column layers that round badly, by less than shows on lattice data or in any one element: only in many together."""

from __future__ import annotations

from typing import Any

import torch
from right import Right

from reference.linear import LinearCase


class Rounded(torch.autograd.Function):
    """To a dtype by a function of one's own, forward only."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, how: Any) -> torch.Tensor:
        rounded: torch.Tensor = how(y)
        return rounded

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.float(), None


class Inexact(Right):
    """Computes its output in fp32 and rounds it itself."""

    def column_linear(self, case: LinearCase) -> Any:
        made = super().column_linear(case)
        layer, dtype = made.module, case.format.torch_dtype
        if dtype not in (torch.bfloat16, torch.float16):
            return made

        def forward(x: torch.Tensor) -> torch.Tensor:
            bias = None if layer.bias is None else layer.bias.float()
            y = torch.nn.functional.linear(self.summed(x).float(), layer.weight.float(), bias)
            rounded: torch.Tensor = Rounded.apply(y, lambda y: self.rounded(y, dtype))
            return rounded

        made.forward = forward
        return made

    def rounded(self, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return y.to(dtype)


class Truncated(Inexact):
    """To bf16 by leaving out the low bits, as a kernel does that has no instruction for it."""

    def rounded(self, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if dtype != torch.bfloat16:
            return y.to(dtype)
        return (y.view(torch.int32) & -(2**16)).view(torch.float32).to(dtype)


class Unscaled(Inexact):
    """Scaled by 3 and back, with the reciprocal of the scale kept in the dtype: a factor within half an ulp of 1."""

    def rounded(self, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (y * 3 * torch.tensor(1 / 3, dtype=dtype).float()).to(dtype)


class OnlyBf16(Inexact):
    dtypes = ("bf16",)
