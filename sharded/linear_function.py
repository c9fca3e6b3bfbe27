"""The products of the parallel linear layers for which torch's own linear will not do.

Legend: T tokens (any dimensions, the first of which sequence parallelism cuts; t where cut), I in_features and
O out_features of this rank's weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from sharded import main_grad, wire
from sharded.autograd import apply


@dataclass(frozen=True)
class Sequence:
    """The input is this rank's piece of the first dimension: of ``length``, or of even pieces where that is None."""

    group: ProcessGroup
    length: int | None


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    sequence: Sequence | None = None,
    to_main_grad: bool = False,
) -> torch.Tensor:
    """x W^T + b: x [T, I] or, where ``sequence`` is given, [t, I]; weight [O, I]; bias [O]; result [T, O].

    to_main_grad: gradients of weight and bias go to the buffers beside them, of which the layer has made sure.
    """
    if sequence is not None and sequence.group.size() == 1:
        sequence = None
    if sequence is None and not to_main_grad:
        return F.linear(x, weight, bias)
    return apply(Linear, x, weight, bias, sequence, to_main_grad)


class Linear(torch.autograd.Function):
    """[T, I] or [t, I], [O, I], [O] -> [T, O]

    The gathered input would live until backward, and sequence parallelism is there to save that memory. So the piece is
    kept and gathered again in backward (arXiv 2205.05198, section 4.2.2), if the weight wants a gradient at all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sequence: Sequence | None,
        to_main_grad: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sequence, ctx.to_main_grad = sequence, to_main_grad
        # The parameters themselves, for their buffers: saved tensors come back as other objects.
        ctx.parameters = weight, bias
        return F.linear(_whole(x, sequence), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        input_grad = weight_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = grad.matmul(weight)
            if ctx.sequence is not None:
                input_grad = wire.reduce_scattered(input_grad, ctx.sequence.group, 0)
        if ctx.needs_input_grad[1]:
            weight_grad = _weight_grad(grad, _whole(x, ctx.sequence), ctx.parameters[0], ctx.to_main_grad)
        if ctx.needs_input_grad[2]:
            bias_grad = _bias_grad(grad, ctx.parameters[1], ctx.to_main_grad)
        return input_grad, weight_grad, bias_grad, None, None


def _whole(x: torch.Tensor, sequence: Sequence | None) -> torch.Tensor:
    return x if sequence is None else wire.gathered(x, sequence.group, 0, sequence.length)


def _weight_grad(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, to_main_grad: bool) -> torch.Tensor | None:
    if to_main_grad:
        main_grad.add_product(weight, grad, x)
        return None
    return main_grad.rows(grad).T @ main_grad.rows(x)


def _bias_grad(grad: torch.Tensor, bias: torch.Tensor, to_main_grad: bool) -> torch.Tensor | None:
    if to_main_grad:
        main_grad.add_sum(bias, grad)
        return None
    return main_grad.rows(grad).sum(0)
