"""Less frequent fused operations of torch, rewritten as a sequence of elementary ones that the mode sees one by one.

Here is what torch's own table of decompositions lacks or lowers to its primitives. All agree with torch's kernels up to
float64's rounding. The frequent ones are in `harness.oracle.fused`, which costs less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from harness.oracle.sizes import fits

Dims = int | list[int] | None


def _peak(x: Tensor, dim: Dims) -> Tensor:
    """The largest value along dim, for a shift that keeps exp in range; an empty one has no values to shift."""
    if not x.numel():
        return x.sum(dim, keepdim=True)
    return x.amax(() if dim is None else dim, keepdim=True)


def logsumexp(x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    peak = _peak(x, dim)
    peak = peak.masked_fill(peak.abs() == math.inf, 0.0)
    total = (x - peak).exp().sum(dim, keepdim=keepdim)
    return total.log() + (peak if keepdim else peak.reshape(total.shape))


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    larger = torch.maximum(a, b)
    return torch.where((a == b) & larger.isinf(), larger, larger + (-(a - b).abs()).exp().log1p())


def logaddexp2(a: Tensor, b: Tensor) -> Tensor:
    larger = torch.maximum(a, b)
    rest = torch.exp2(-(a - b).abs()).log1p() / math.log(2)
    return torch.where((a == b) & larger.isinf(), larger, larger + rest)


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, inner: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    normal, mean, rstd = torch.native_layer_norm(x.reshape(n, group, -1), [c // group * inner], None, None, eps)
    y, per_channel = normal.reshape(x.shape), [1, c] + [1] * (x.dim() - 2)
    y = y if weight is None else y * weight.reshape(per_channel)
    return (y if bias is None else y + bias.reshape(per_channel)), mean.squeeze(-1), rstd.squeeze(-1)


def _moments(x: Tensor, dim: Dims, correction: float | None) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim())) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    count = math.prod(x.shape[d] for d in dims) if x.dim() else 1
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    degrees = count - (1.0 if correction is None else correction)
    return (centred * centred).sum(dims, keepdim=True) / max(degrees, 0.0), mean


def _shaped(x: Tensor, like: Tensor, dim: Dims, keepdim: bool) -> Tensor:
    if keepdim:
        return x
    dims = range(like.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    removed = {d % like.dim() for d in dims} if like.dim() else set()
    return x.reshape([n for d, n in enumerate(like.shape) if d not in removed])


def var_mean(
    x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    variance, mean = _moments(x, dim, correction)
    return _shaped(variance, x, dim, keepdim), _shaped(mean, x, dim, keepdim)


def var(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def std(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return var(x, dim, correction=correction, keepdim=keepdim).sqrt()


def std_mean(
    x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    variance, mean = var_mean(x, dim, correction=correction, keepdim=keepdim)
    return variance.sqrt(), mean


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, scaled.exp().log1p() / beta)


def mish(x: Tensor) -> Tensor:
    return x * torch.tanh(softplus(x))


def elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    return torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale))


def celu(x: Tensor, alpha: float = 1) -> Tensor:
    return elu(x, alpha, 1, 1 / alpha)


def selu(x: Tensor) -> Tensor:
    return elu(x, 1.6732632423543772, 1.0507009873554805)


def glu(x: Tensor, dim: int = -1) -> Tensor:
    value, gate = x.chunk(2, dim)
    return value * torch.sigmoid(gate)


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    return torch.where(x > 0, x, x * negative_slope)


def logit(x: Tensor, eps: float | None = None) -> Tensor:
    x = x if eps is None else x.clamp(eps, 1 - eps)
    return torch.log(x / (1 - x))


def linalg_cross(a: Tensor, b: Tensor, *, dim: int = -1) -> Tensor:
    return a.roll(-1, dim) * b.roll(1, dim) - a.roll(1, dim) * b.roll(-1, dim)


def addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + (a * b if value == 1 else value * (a * b))


def addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + (a / b if value == 1 else value * (a / b))


def lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    moved: Tensor = start + weight * (end - start)
    return moved


def huber_loss(x: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    distance = (x - target).abs()
    loss = torch.where(distance < delta, 0.5 * distance * distance, delta * (distance - 0.5 * delta))
    return loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss


def mse_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    """The kernel rounds the factor to the format of its arguments."""
    factor = torch.full((), 2 / x.numel() if reduction == 1 and x.numel() else 2.0, dtype=x.dtype)
    return factor * (x - target) * grad


def huber_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, delta: float) -> Tensor:
    """The kernel rounds the factor to the format of its arguments."""
    factor = torch.full((), 1 / x.numel() if reduction == 1 and x.numel() else 1.0, dtype=x.dtype)
    return factor * (x - target).clamp(-delta, delta) * grad


def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """With the kernel's own draw of the mask, so that a seeded run has the same one."""
    if train is False or not x.numel():
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def rounds_a_number(args: Any, kwargs: Any) -> bool:
    """Whether a sum has a factor, or a number that kernels, which hold numbers in fp32 or better, round."""
    if not args[0].is_floating_point():
        return False
    alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
    return bool(alpha != 1 or (isinstance(args[1], float) and not fits(args[1], 24)))


def _add(x: Tensor, other: Any, alpha: float = 1) -> Tensor:
    return torch.add(x, _scaled(x, other, alpha))


def _sub(x: Tensor, other: Any, alpha: float = 1) -> Tensor:
    return torch.sub(x, _scaled(x, other, alpha))


def _rsub(x: Tensor, other: Any, alpha: float = 1) -> Tensor:
    other = other if isinstance(other, Tensor) else torch.full((), other, dtype=x.dtype)
    return torch.sub(other, _scaled(x, x, alpha))


def _scaled(x: Tensor, other: Any, alpha: float) -> Tensor:
    added: Tensor = other if isinstance(other, Tensor) else torch.full((), other, dtype=x.dtype)
    # The kernels of fp16 and bf16 round the factor to their format first.
    return added if alpha == 1 else added * torch.full((), alpha, dtype=x.dtype)


#: Sums that round their factor's product, or a number, before they add.
SCALED_SUMS: Mapping[str, Callable[..., Any]] = {"add": _add, "sub": _sub, "rsub": _rsub}

#: By the name of the operation without namespace, overload and the underscore of the in-place form.
DECOMPOSITIONS: Mapping[str, Callable[..., Any]] = {
    "native_group_norm": group_norm,
    **{f.__name__: f for f in (logsumexp, logaddexp, logaddexp2, var, var_mean, std, std_mean, native_dropout)},
    **{f.__name__: f for f in (linalg_cross, softplus, mish, elu, celu, selu, leaky_relu, glu, logit)},
    **{f.__name__: f for f in (addcmul, addcdiv, lerp, huber_loss, huber_loss_backward, mse_loss_backward)},
}
