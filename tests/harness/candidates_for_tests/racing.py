"""Sums that are wrong where a rank is made to come late. A real race also sees a loaded machine; this one sees who is
told to sleep, and so is the same everywhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from harness.candidates.builtin import Builtin
from harness.module import Sharded
from reference.collectives import CollectivesCase
from reference.traffic import Transfer

_slept: list[float] = []
_sleep = time.sleep


def _listening(seconds: float) -> None:
    _slept.append(seconds)
    _sleep(seconds)


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        summed = x.clone(memory_format=torch.contiguous_format)
        _slept.clear()
        dist.all_reduce(summed, group=group)
        late = torch.tensor([max(_slept, default=0.0)])
        dist.all_reduce(late, op=dist.ReduceOp.MAX, group=group)
        return x.clone() if late.item() else summed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class Racing(Builtin):
    dtypes = ("fp32",)

    def traffic(self, case: Any, needed: Sequence[Transfer]) -> Sequence[Transfer]:
        """Who was late is told too."""
        return (*needed, *(replace(one, elements=1) for one in needed))

    def collective(self, case: CollectivesCase) -> Sharded:
        time.sleep = _listening
        made = super().collective(case)
        if case.kind == "reduce" and case.parallel_size > 1:
            made.forward = lambda x: Sum.apply(x, self.groups.group(case.axis))
        return made
