"""Faults in the reductions that are made of point-to-point sends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import Work

from sharded import all_reduce, halving_doubling, parameter_server, point_to_point, reductions, ring, tree
from sharded.mutants import Mutant, Patch


def _tail_left_out() -> list[Patch]:
    def pieces(x: torch.Tensor, size: int) -> list[torch.Tensor]:
        chunk = x.numel() // size
        return [x[i * chunk : (i + 1) * chunk] for i in range(size)]

    return [(ring, "pieces", pieces)]


def _returns_what_it_did_not_reduce() -> list[Patch]:
    def deliver(x: torch.Tensor, result: torch.Tensor, in_place: bool) -> torch.Tensor:
        return x if in_place else result.view(x.shape)

    return [(all_reduce, "deliver", deliver)]


_kept: list[Work] = []  # a message whose handle is gone is never delivered, which would be another fault


def _waits_for_the_first_handle_only() -> list[Patch]:
    def wait_for(works: Sequence[Work]) -> None:
        _kept.extend(works[1:])
        for work in works[:1]:
            work.wait()

    return [(point_to_point, "wait_for", wait_for)]


def _partial_sums_in_the_tensors_dtype() -> list[Patch]:
    def accumulation_dtype(dtype: torch.dtype, reduction: str, fp32: bool) -> torch.dtype:
        return dtype

    return [(all_reduce, "accumulation_dtype", accumulation_dtype)]


def _divides_twice() -> list[Patch]:
    def finish(total: torch.Tensor, result: torch.Tensor, reduction: str, count: int) -> None:
        reductions.finish(total, result, reduction, count)
        if reduction == "avg":
            result.div_(count)

    return [(module, "finish", finish) for module in (ring, halving_doubling, tree, parameter_server)]


MUTANTS = (
    Mutant(
        "F06b",
        "all_reduce",
        "an all-reduce in place reduces a contiguous copy and returns the original",
        "NVIDIA/Megatron-LM#5337",
        _returns_what_it_did_not_reduce,
    ),
    Mutant(
        "F44b",
        "all_reduce",
        "partial sums are rounded to bf16 where fp32 was asked",
        "pytorch/pytorch#190627",
        _partial_sums_in_the_tensors_dtype,
    ),
    Mutant(
        "F49b",
        "all_reduce",
        "waits for the first of several send and receive handles only",
        "pytorch/pytorch#152938",
        _waits_for_the_first_handle_only,
    ),
    Mutant(
        "F52", "all_reduce", "ring chunk = length // n: the tail is never reduced", "pytorch/PiPPy#478", _tail_left_out
    ),
    Mutant("F52b", "all_reduce", "the mean divides by n twice", "own", _divides_twice),
)
