"""Megatron-Core's DistributedDataParallel, as the candidate ``megatron-core`` offers it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from harness.candidate import NotOffered
from harness.data_parallel import DataParallel
from reference.data_parallel import DataParallelCase, trained

if importlib.util.find_spec("megatron") is not None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

#: It reduces once a batch, in the format in which it accumulates. Without overlap it has no buckets, which changes the
#: order of sums, so that bits may differ; here it overlaps where the case has buckets.
FEATURES = (
    "data_parallel_any_axis",
    "data_parallel_no_sync",
    "data_parallel_sum",
    "data_parallel_main_grad",
    "data_parallel_unused",
    "data_parallel_order",
    "data_parallel_tied",
    "data_parallel_frozen",
)


def distributed(
    case: DataParallelCase,
    module: nn.Module,
    group: dist.ProcessGroup,
    alone: dist.ProcessGroup,
    known_fault: Callable[[str], None],
) -> DataParallel:
    """The module in a DistributedDataParallel over a group. alone: a group of this rank, for the axes of its mesh that
    have nothing to do with it. known_fault: refuses a case that meets one."""
    unused = bool(case.skipped) or any(layer.kind == "unused" for layer in case.layers)
    overlap = case.bucket < sum(math.prod(shape) for shape in trained(case).values())
    if overlap and unused:
        raise NotOffered("with overlap_grad_reduce it asserts that every parameter of a bucket is used")
    if overlap and case.rotated and case.steps > 1 and case.parallel_size > 1 and len(case.layers) > 1:
        known_fault("overlap_grad_reduce: buckets are reduced in the order of each rank's gradients, and mixed up")
    groups = ProcessGroupCollection()
    for name in ("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp"):
        setattr(groups, name, group)
    for name in ("tp", "pp", "ep", "cp"):
        setattr(groups, name, alone)
    wrapped: Any = DistributedDataParallel(
        TransformerConfig(
            num_layers=1,
            hidden_size=1,
            num_attention_heads=1,
            calculate_per_token_loss=case.reduction == "sum",
            use_cpu_initialization=True,
        ),
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=case.main_grad,
            overlap_grad_reduce=overlap,
            bucket_size=case.bucket,
        ),
        module,
        pg_collection=groups,
    )
    return DataParallel(
        wrapped,
        no_sync=wrapped.no_sync,
        finish=wrapped.finish_grad_sync,
        zero_grad=wrapped.zero_grad_buffer,
        read_grad=lambda parameter: getattr(parameter, "main_grad", None),
    )
