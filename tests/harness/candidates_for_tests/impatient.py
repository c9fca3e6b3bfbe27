"""Sums that wait for a while and not for the others: right as long as all ranks come at about the same time."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from harness.candidates.builtin import Builtin
from harness.module import Sharded
from reference.collectives import CollectivesCase

#: Seconds: longer than a sum takes on a machine that is not overloaded, shorter than many a delay.
PATIENCE = 0.008


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        summed = x.clone(memory_format=torch.contiguous_format)
        work = dist.all_reduce(summed, group=group, async_op=True)
        time.sleep(PATIENCE)
        read = summed.clone()
        work.wait()
        return read

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class Impatient(Builtin):
    dtypes = ("fp32",)

    def collective(self, case: CollectivesCase) -> Sharded:
        made = super().collective(case)
        if case.kind == "reduce" and case.parallel_size > 1:
            made.forward = lambda x: Sum.apply(x, self.groups.group(case.axis))
        return made
