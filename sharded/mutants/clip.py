"""Faults of clipping: what is counted twice or not at all, norms in too narrow a format, and coefficients of norms that
are still scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.distributed import ProcessGroup

from sharded import clip
from sharded.clip import Held
from sharded.mutants import Mutant, Patch

Groups = Mapping[str, ProcessGroup]


def _clipped_before_unscaling() -> list[Patch]:
    original = clip.clip_coefficient

    def clip_coefficient(norm: float, limit: float, eps: float, loss_scale: float) -> float:
        return original(norm * loss_scale, limit, eps, loss_scale)

    return [(clip, "clip_coefficient", clip_coefficient)]


def _unscaled_twice() -> list[Patch]:
    original = clip.factor

    def factor(coefficient: float, loss_scale: float) -> float:
        return original(coefficient, loss_scale) / loss_scale

    return [(clip, "factor", factor)]


def _all_count(axis: str) -> list[Patch]:
    def counts(one: Held) -> bool:
        return not one.copy and all(group.rank() == 0 for name, group in one.alike.items() if name != axis)

    return [(clip, "counts", counts)]


def _not_over(axis: str) -> list[Patch]:
    summed, largest = clip.summed, clip.largest

    def without(groups: Groups) -> Groups:
        return {name: group for name, group in groups.items() if name != axis}

    return [
        (clip, "summed", lambda total, groups: summed(total, without(groups))),
        (clip, "largest", lambda found, groups: largest(found, without(groups))),
    ]


def _maximum_to_the_power_of_nothing() -> list[Patch]:
    original = clip.largest

    def largest(found: torch.Tensor, groups: Groups) -> float:
        """(sum x^inf)^(1/inf), as for any other p."""
        right = original(found, groups)
        return right ** (1 / math.inf) if math.isfinite(right) else right

    return [(clip, "largest", largest)]


def _maxima_summed() -> list[Patch]:
    return [(clip, "largest", clip.summed)]


def _squared_in_the_dtype() -> list[Patch]:
    def power_sum(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
        low = gradient.dtype in (torch.float16, torch.bfloat16)
        return (gradient if low else clip.wide(gradient)).abs().pow(norm_type).to(torch.float64).sum()

    return [(clip, "power_sum", power_sum)]


def _only_with_a_loss_scale() -> list[Patch]:
    original = clip.clip_coefficient

    def clip_coefficient(norm: float, limit: float, eps: float, loss_scale: float) -> float:
        return 1.0 if loss_scale == 1 else original(norm, limit, eps, loss_scale)

    return [(clip, "clip_coefficient", clip_coefficient)]


def _copies_count() -> list[Patch]:
    def counts(one: Held) -> bool:
        return all(group.rank() == 0 for group in one.alike.values())

    return [(clip, "counts", counts)]


def _maximum_loses_nan() -> list[Patch]:
    original = clip.largest

    def largest(found: torch.Tensor, groups: Groups) -> float:
        return original(found.nan_to_num(nan=0.0, posinf=math.inf), groups)

    return [(clip, "largest", largest)]


def _scaled_up_to_the_limit() -> list[Patch]:
    def clip_coefficient(norm: float, limit: float, eps: float, loss_scale: float) -> float:
        return limit / (norm + eps) if norm else 1.0

    return [(clip, "clip_coefficient", clip_coefficient)]


def _summed_in_fp32() -> list[Patch]:
    def power_sum(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
        return gradient.to(torch.float32).abs().pow(norm_type).sum().to(torch.float64)

    return [(clip, "power_sum", power_sum)]


def _only_what_counts_is_clipped() -> list[Patch]:
    original = clip.multiply

    def multiply(held: list[Held], by: float) -> None:
        """Only what counts towards the norm is clipped."""
        original([one for one in held if clip.counts(one)], by)

    return [(clip, "multiply", multiply)]


MUTANTS = (
    Mutant("F31", "clip", "clipped before unscaling", "deepspeedai/DeepSpeed#8588", _clipped_before_unscaling),
    Mutant("F31b", "clip", "unscaled twice", "deepspeedai/DeepSpeed#8588", _unscaled_twice),
    Mutant(
        "F32",
        "clip",
        "replicated parameters are counted on every tp rank",
        "NVIDIA-NeMo/RL#3788",
        lambda: _all_count("tp"),
    ),
    Mutant("F33", "clip", "the norm is not reduced over pp", "pytorch/torchtitan#649", lambda: _not_over("pp")),
    Mutant(
        "F34",
        "clip",
        "powers are summed again over dp replicas",
        "pytorch/pytorch#88955",
        lambda: _all_count("dp"),
    ),
    Mutant("F34b", "clip", "the parts of sharded gradients are not summed over dp", "own", lambda: _not_over("dp")),
    Mutant(
        "F35",
        "clip",
        "the inf norm is raised to 1/inf, which is always 1",
        "meta-pytorch/torchrec#3199",
        _maximum_to_the_power_of_nothing,
    ),
    Mutant("F35b", "clip", "the maxima of the ranks are summed", "meta-pytorch/torchrec#3199", _maxima_summed),
    Mutant("F35c", "clip", "the maximum loses a NaN", "own", _maximum_loses_nan),
    Mutant("F36", "clip", "squared in fp16 before promotion", "facebookresearch/fairscale#263", _squared_in_the_dtype),
    Mutant("F36b", "clip", "powers are taken in fp32, which overflow", "own", _summed_in_fp32),
    Mutant(
        "F37",
        "clip",
        "nothing is clipped when the loss scale is 1",
        "deepspeedai/DeepSpeed#3790",
        _only_with_a_loss_scale,
    ),
    Mutant("F37b", "clip", "gradients within the limit are scaled up to it", "own", _scaled_up_to_the_limit),
    Mutant("F38", "clip", "a tied parameter is counted on both stages", "own", _copies_count),
    Mutant(
        "F38b",
        "clip",
        "only those parameters are clipped that count on the rank",
        "own",
        _only_what_counts_is_clipped,
    ),
)
