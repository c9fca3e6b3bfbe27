"""The products of the parallel linear layers for which torch's own linear will not do.

Legend: T tokens (any dimensions, the first of which sequence parallelism cuts; t where cut), I in_features and
O out_features of this rank's weight, another number for each weight where there are several.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from sharded import main_grad, wire
from sharded.autograd import apply_all

#: A weight [O, I] and its bias [O].
Parameters: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]


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
    """x W^T + b, see `linears`."""
    return linears(x, [(weight, bias)], sequence=sequence, to_main_grad=to_main_grad)[0]


def linears(
    x: torch.Tensor, parameters: Iterable[Parameters], *, sequence: Sequence | None = None, to_main_grad: bool = False
) -> tuple[torch.Tensor, ...]:
    """x W^T + b for each weight and bias: x [T, I] or, where ``sequence`` is given, [t, I]; results [T, O].

    to_main_grad: gradients of weights and biases go to the buffers beside them, of which the layer has made sure.
    """
    if sequence is not None and sequence.group.size() == 1:
        sequence = None
    if sequence is None and not to_main_grad:
        return tuple(F.linear(x, weight, bias) for weight, bias in parameters)
    weights, biases = zip(*parameters, strict=True)
    return apply_all(Linears, x, sequence, to_main_grad, *weights, *biases)


class Linears(torch.autograd.Function):
    """[T, I] or [t, I], [O, I] ..., [O] ... -> [T, O] ...

    The gathered input would live until backward, and sequence parallelism is there to save that memory. So the piece is
    kept and gathered again in backward, once, if any weight wants a gradient at all (arXiv 2205.05198, section 4.2.2).
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, sequence: Sequence | None, to_main_grad: bool, *parameters: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = _halves(parameters)
        ctx.save_for_backward(x, *weights)
        ctx.sequence, ctx.to_main_grad = sequence, to_main_grad
        # The parameters themselves, for their buffers: saved tensors come back as other objects.
        ctx.parameters = parameters
        whole = _whole(x, sequence)
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad
        own_weights, own_biases = _halves(ctx.parameters)
        weights_need, biases_need = _halves(needed[3:])
        input_grad = None
        if needed[0]:
            input_grad = _sum(grad.matmul(weight) for grad, weight in zip(grads, weights, strict=True))
            if ctx.sequence is not None:
                input_grad = wire.reduce_scattered(input_grad, ctx.sequence.group, 0)
        whole = _whole(x, ctx.sequence) if any(weights_need) else x
        weight_grads = [
            _weight_grad(grad, whole, weight, ctx.to_main_grad) if need else None
            for grad, weight, need in zip(grads, own_weights, weights_need, strict=True)
        ]
        bias_grads = [
            _bias_grad(grad, bias, ctx.to_main_grad) if need else None
            for grad, bias, need in zip(grads, own_biases, biases_need, strict=True)
        ]
        return input_grad, None, None, *weight_grads, *bias_grads


def _sum(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum; Python's own would begin by adding a zero."""
    return functools.reduce(torch.add, terms)


def _halves(both: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What belongs to the weights, and what to the biases."""
    return both[: len(both) // 2], both[len(both) // 2 :]


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
