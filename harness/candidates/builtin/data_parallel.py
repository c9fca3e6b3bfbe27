"""The module that reduces its gradients, and the loss that it is trained with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from harness.data_parallel import DataParallel
from reference.data_parallel import DataParallelCase, trained
from reference.dtypes import format_of
from reference.traffic import Transfer
from sharded import buckets, loss_normalization
from sharded.data_parallel import DistributedDataParallel
from sharded.process_groups import ProcessGroups


def data_parallel(case: DataParallelCase, module: torch.nn.Module, groups: ProcessGroups) -> DataParallel:
    group = groups.group(case.axis)
    wrapped = DistributedDataParallel(
        module,
        group,
        bucket_elements=case.bucket,
        reduction=case.reduction,
        reduce_dtype=None if case.reduce_dtype == "same" else format_of(case.reduce_dtype).torch_dtype,
        gradient_as_view=case.views,
        overlap=case.overlap,
        main_grad=case.main_grad,
    )
    scale = group.size() if case.reduction == "average" else 1
    shares: list[torch.Tensor] = []
    divisors: list[torch.Tensor] = []

    def loss(token_losses: torch.Tensor, valid: Sequence[torch.Tensor], m: int) -> torch.Tensor:
        if m == 0:  # of the step
            shares.clear()
            divisors[:] = [loss_normalization.divisor(valid, case.loss, group)]
        shares.append(loss_normalization.share(token_losses, valid[m], case.loss, divisors[0]))
        return shares[-1] * scale

    def report() -> torch.Tensor:
        return loss_normalization.over_ranks(torch.stack(shares).sum().detach(), group)

    return DataParallel(
        wrapped, no_sync=wrapped.no_sync, finish=wrapped.finish, loss=loss, report=report, close=wrapped.close
    )


def in_buckets(case: DataParallelCase, needed: Sequence[Transfer]) -> Sequence[Transfer]:
    """The buckets of the first reduction; after it their order is that of use."""
    if not needed:
        return needed
    sizes = [math.prod(shape) for shape in trained(case).values()]
    planned = buckets.plan(sizes, [torch.float32] * len(sizes), range(len(sizes))[::-1], case.bucket)
    pieces = [replace(needed[0], elements=sum(sizes[index] for index in members)) for members in planned]
    return [*pieces, *needed[1:]]
