"""The fused operations of most references, written out so that the rounding model sees what rounds inside.

A fused kernel rounds inside: log-softmax is the difference of terms that can be far larger than it is, so a disturbance
relative to the result would say too little. Here ``r(...)`` marks each rounding. Every function takes the arguments of
torch's operation, all tensors with equally many dimensions after those of the rounder's ``lead``, and returns its
results; without disturbance they agree with torch's kernel up to float64's own rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.oracle.noise import Rounder
from harness.oracle.tables import LIBRARY_ROUNDINGS as LIBRARY


def _last(r: Rounder, x: Tensor, dim: int) -> int:
    """The dimension counted from the last, -1."""
    return dim if dim < 0 else dim - max(r.rank(x), 1)


def _shifted(r: Rounder, x: Tensor, dim: int) -> Tensor:
    """x less its largest value, so that exp stays in range."""
    return r(x - x.amax(dim, keepdim=True), underflows=False) if x.numel() else x.clone()


def softmax(r: Rounder, x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """Also as flash attention does it in backward (arXiv 2307.08691, section 3.1): exp(x - log of the sum of exp(x)),
    where the rounding of the logarithm moves a whole row."""
    dim = _last(r, x, dim)
    e = r(torch.exp(_shifted(r, x, dim)), LIBRARY)
    total = r.sum(e, [dim], True)
    y = r(e / total)
    return r.together(y, x.amax(dim, keepdim=True) + total.log()) if x.numel() else y


def safe_softmax(r: Rounder, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax whose rows without any finite value are zero."""
    dim = _last(r, x, dim)
    return softmax(r, x, dim).masked_fill_(x.eq(-math.inf).all(dim, keepdim=True), 0.0)


def softmax_backward(r: Rounder, grad: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """The sum of grad * y has errors of its own: flash attention computes it from the attention's output and its
    gradient (arXiv 2307.08691, section 3.1), so that nothing of the gradient's errors cancels."""
    total = r.sum(r(r.another(grad) * y), [_last(r, y, dim)], True)
    return r(r(grad * y) - r(y * total), underflows=False)


def log_softmax(r: Rounder, x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    dim = _last(r, x, dim)
    shifted = _shifted(r, x, dim)
    total = r.sum(r(shifted.exp(), LIBRARY), [dim], True)
    return r(shifted - r(total.log(), LIBRARY), underflows=False)


def log_softmax_backward(r: Rounder, grad: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    taken = r(r(y.exp(), LIBRARY) * r.sum(grad, [_last(r, y, dim)], True))
    return r(grad - taken, underflows=False)


def layer_norm(
    r: Rounder, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(-len(shape), 0))
    mean = r.mean(x, dims, True)
    centred = r(x - mean, underflows=False)
    rstd = r(torch.rsqrt(r(r.mean(r(centred * centred), dims, True) + eps)), LIBRARY)
    y = r(centred * rstd)
    y = y if weight is None else r(y * weight)
    return (y if bias is None else r(y + bias, underflows=False)), mean, rstd


def layer_norm_backward(
    r: Rounder,
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    dims, outer = list(range(-len(shape), 0)), list(range(-r.rank(x), -len(shape)))
    normal = r(r(x - mean, underflows=False) * rstd)
    d_input = d_weight = d_bias = None
    if output_mask[0]:
        g = grad if weight is None else r(grad * weight)
        along = r(normal * r.mean(r(g * normal), dims, True))
        rest = r(r(g - r.mean(g, dims, True), underflows=False) - along, underflows=False)
        d_input = r(rest * rstd)
    if output_mask[1] and weight is not None:
        products = r(grad * normal)
        d_weight = r.sum(products, outer) if outer else products
    if output_mask[2] and bias is not None:
        d_bias = r.sum(grad, outer) if outer else grad.clone()
    return d_input, d_weight, d_bias


def gelu(r: Rounder, x: Tensor, *, approximate: str = "none") -> Tensor:
    """x times the normal distribution function, or its approximation by tanh (Hendrycks and Gimpel, 2016)."""
    return r(x * (0.5 * _twice_normal(r, x, approximate)))


def _twice_normal(r: Rounder, x: Tensor, approximate: str) -> Tensor:
    if approximate == "tanh":
        cube = r(r(x * x) * x)
        inner = r.times(r(x + r.times(cube, 0.044715), underflows=False), math.sqrt(2 / math.pi))
        return r(1 + r(torch.tanh(inner), LIBRARY))
    return r(1 + r(torch.erf(r.times(x, math.sqrt(0.5))), LIBRARY))


def gelu_backward(r: Rounder, grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    twice = _twice_normal(r, x, approximate)
    square = r(x * x)
    if approximate == "tanh":
        tanh = r(twice - 1)
        inner = r.times(r(1 + r.times(square, 3 * 0.044715)), math.sqrt(2 / math.pi))
        slope = r(r(0.5 * x * r(1 - r(tanh * tanh))) * inner)
    else:
        slope = r(x * r.times(r(torch.exp(-0.5 * square), LIBRARY), math.sqrt(0.5 / math.pi)))
    return r(grad * r(0.5 * twice + slope))


def silu(r: Rounder, x: Tensor) -> Tensor:
    return r(x * r(torch.sigmoid(x), LIBRARY))


def silu_backward(r: Rounder, grad: Tensor, x: Tensor) -> Tensor:
    s = r(torch.sigmoid(x), LIBRARY)
    return r(r(grad * s) * r(1 + r(x * r(1 - s))))


def sigmoid_backward(r: Rounder, grad: Tensor, y: Tensor) -> Tensor:
    return r(r(grad * r(1 - y)) * y)


def tanh_backward(r: Rounder, grad: Tensor, y: Tensor) -> Tensor:
    return r(grad * r(1 - r(y * y)))


#: By the name of the operation without namespace, overload and the underscore of the in-place form.
FUSED: Mapping[str, Callable[..., Any]] = {
    "_softmax": softmax,
    "_safe_softmax": safe_softmax,
    "_softmax_backward_data": softmax_backward,
    "_log_softmax": log_softmax,
    "_log_softmax_backward_data": log_softmax_backward,
    "native_layer_norm": layer_norm,
    "native_layer_norm_backward": layer_norm_backward,
    **{f.__name__: f for f in (gelu, gelu_backward, silu, silu_backward, sigmoid_backward, tanh_backward)},
}
