"""PyTorch's DistributedDataParallel, as the candidate ``torch`` offers it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from harness.data_parallel import DataParallel
from reference.data_parallel import DataParallelCase

#: What DistributedDataParallel does. It averages, in the dtype of the gradients: what else is wanted is left to hooks,
#: of which those for bf16 refuse gloo. It checks shapes, and neither dtypes nor order. Overlap cannot be switched off.
DDP_FEATURES = (
    "data_parallel_any_axis",
    "data_parallel_no_sync",
    "data_parallel_sync_every",
    "data_parallel_unused",
    "data_parallel_order",
    "data_parallel_tied",
    "data_parallel_frozen",
    "data_parallel_views",
)


def distributed(case: DataParallelCase, module: nn.Module, group: dist.ProcessGroup) -> DataParallel:
    """The module in a DistributedDataParallel."""
    size = torch.empty((), dtype=case.format.torch_dtype).element_size()
    wrapped = nn.parallel.DistributedDataParallel(
        module,
        process_group=group,
        bucket_cap_mb=case.bucket * size / 2**20,
        find_unused_parameters=bool(case.skipped) or any(layer.kind == "unused" for layer in case.layers),
        gradient_as_bucket_view=case.views,
    )
    return DataParallel(wrapped, no_sync=wrapped.no_sync)
