"""Clipping by the global norm of gradients that lie in parts, and several times, on the ranks.

Every element is counted once: a parameter that the ranks of a group hold alike counts on the first of them, and of
tied copies one counts. What the ranks found is summed, or its maximum taken, over one group after the other, so that
all have the same bits. Sums are kept in fp64, where the powers of a gradient in fp32 have room up to the sixth; for
higher ones gradients are divided by the largest of them, about which the ranks agree before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_LARGEST = float(torch.finfo(torch.float32).max)
#: fp32 has numbers from 2^-149 to 2^128, fp64 from 2^-1022 to 2^1024.
_MOST_POWER = 6.0
POLICIES = ("propagate", "skip", "raise")


@dataclass(frozen=True)
class Held:
    """A parameter that this rank holds, or its part of it.

    alike: the groups, by their axis, whose ranks all hold the same elements of it. copy: another stage holds the tied
    parameter that counts.
    """

    parameter: torch.Tensor
    alike: Mapping[str, ProcessGroup] = field(default_factory=dict)
    copy: bool = False


@dataclass(frozen=True)
class Clipped:
    """norm: before clipping, without the loss scale. coefficient: by which gradients were multiplied beside the inverse
    of the loss scale; NaN or 0 where the norm is not finite. skipped: the step is to be skipped, and gradients are as
    they were."""

    norm: float
    coefficient: float
    skipped: bool = False


class NonFiniteNorm(RuntimeError):
    """The norm of the gradients is infinite or NaN, and the policy is ``raise``."""


def clip_gradients(
    held: Sequence[Held],
    limit: float,
    *,
    norm_type: float = 2.0,
    groups: Mapping[str, ProcessGroup] | None = None,
    loss_scale: float = 1.0,
    policy: str = "propagate",
    eps: float = 0.0,
    device: torch.device | str = "cpu",
) -> Clipped:
    """Divides gradients by the loss scale, and multiplies them by limit / (norm + eps) where that is below 1, in place.
    Every rank of the groups must call it, also one without gradients.

    held: the parameters of this rank. norm_type: 1, 2, infinity, or another p above 0. groups: by their axis, over
    which parts and stages lie; together they must reach every rank. policy: where the norm is not finite, multiply all
    the same (``propagate``), leave gradients as they are and say so (``skip``), or ``raise``. device: of what is sent.

    Raises ValueError for a limit, a norm type or a loss scale that is not above 0, an infinite loss scale, an eps that
    is not from 0, and for an unknown policy; and NonFiniteNorm on every rank.
    """
    require_clipping(limit, eps)
    _require_above_zero("norm_type", norm_type, math.inf)
    _require_above_zero("loss_scale", loss_scale, _LARGEST)
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}: expected one of {', '.join(POLICIES)}")
    norm = unscaled(gradient_norm(held, norm_type, groups or {}, device), loss_scale)
    coefficient = clip_coefficient(norm, limit, eps, loss_scale)
    if not math.isfinite(norm):
        if policy == "raise":
            raise NonFiniteNorm(f"the {norm_type:g}-norm of the gradients is {norm}: skip the step, or find its cause")
        if policy == "skip":
            return Clipped(norm, coefficient, skipped=True)
    multiply(held, factor(coefficient, loss_scale))
    return Clipped(norm, coefficient)


def require_clipping(limit: float, eps: float) -> None:
    """Raises ValueError for a limit or an eps by which nothing can be clipped."""
    _require_above_zero("limit", limit, math.inf)
    if not isinstance(eps, float | int) or not 0 <= eps < math.inf:
        raise ValueError(f"eps is {eps!r}: expected a finite number from 0")


def _require_above_zero(name: str, value: object, most: float) -> None:
    if not isinstance(value, float | int) or not 0 < value <= most:
        raise ValueError(f"{name} is {value!r}: expected a {'' if most == math.inf else 'finite '}number above 0")


def gradient_norm(
    held: Sequence[Held], norm_type: float, groups: Mapping[str, ProcessGroup], device: torch.device | str = "cpu"
) -> float:
    """The norm of the gradients of all ranks, as they are. Arguments as of `clip_gradients`."""
    own = [one.parameter.grad for one in held if counts(one) and one.parameter.grad is not None]
    own = [gradient.detach() for gradient in own if gradient.numel()]
    if norm_type == math.inf:
        found = [wide(gradient).abs().max() for gradient in own]
        return largest(torch.stack(found).max().to(device) if found else _zero(device), groups)
    unit = 1.0
    if norm_type > _MOST_POWER:
        found = [wide(gradient).abs().max() for gradient in own]
        top = largest(torch.stack(found).max().to(device) if found else _zero(device), groups)
        unit = top if 0 < top < math.inf else 1.0
    total = _zero(device)
    for gradient in own:
        total += power_sum(gradient if unit == 1 else wide(gradient) / unit, norm_type).to(device)
    return unit * root(summed(total, groups), norm_type)


def counts(one: Held) -> bool:
    """Whether this rank counts a parameter: exactly one of those that hold the same elements does."""
    return not one.copy and all(group.rank() == 0 for group in one.alike.values())


def wide(gradient: torch.Tensor) -> torch.Tensor:
    """In the format of the sums."""
    return gradient.to(torch.float64)


def power_sum(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The sum of |g|^p, a scalar in fp64."""
    values = wide(gradient).abs()
    if norm_type == 1:
        return values.sum()
    return (values * values if norm_type == 2 else values**norm_type).sum()


def root(total: float, norm_type: float) -> float:
    """The p-th root of the sum of powers."""
    if norm_type == 1 or total == 0 or not math.isfinite(total):
        return total
    if norm_type == 2:
        return math.sqrt(total)
    # 1/p is rounded, and what that does grows with the logarithm: so the power of two is taken out first.
    mantissa, exponent = math.frexp(total)
    whole = math.floor(exponent / norm_type)
    try:
        return math.ldexp((mantissa * 2.0 ** (exponent - norm_type * whole)) ** (1 / norm_type), whole)
    except OverflowError:  # of many elements, with a small p
        return math.inf


def summed(total: torch.Tensor, groups: Mapping[str, ProcessGroup]) -> float:
    """The sum over all ranks."""
    for group in groups.values():
        if group.size() > 1:
            dist.all_reduce(total, group=group)
    return float(total)


def largest(found: torch.Tensor, groups: Mapping[str, ProcessGroup]) -> float:
    """The maximum over all ranks, NaN where any has one. That travels beside it: a backend's maximum may lose it."""
    nan = found.isnan()
    pair = torch.stack([torch.where(nan, 0.0, found), nan.to(found.dtype)])
    for group in groups.values():
        if group.size() > 1:
            dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
    return math.nan if pair[1] else float(pair[0])


def unscaled(norm: float, loss_scale: float) -> float:
    """The norm without the loss scale."""
    return norm / loss_scale


def clip_coefficient(norm: float, limit: float, eps: float, loss_scale: float) -> float:
    """1 where the norm is within the limit; norm: without the loss scale."""
    if norm + eps <= limit:
        return 1.0
    return limit / (norm + eps)


def factor(coefficient: float, loss_scale: float) -> float:
    """By which the gradients are multiplied, as they are."""
    return coefficient / loss_scale


def multiply(held: Sequence[Held], by: float) -> None:
    """Multiplies all gradients that there are, in place, and rounds once."""
    if by == 1:
        return
    for one in held:
        gradient = one.parameter.grad
        if gradient is not None:
            with torch.no_grad():
                gradient.copy_(wide(gradient) * by)


def _zero(device: torch.device | str) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)
