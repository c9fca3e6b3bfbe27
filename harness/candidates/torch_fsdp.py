"""PyTorch's fully_shard (FSDP2) around a whole network. Gradients are cut along their first dimension, in chunks.

Not offered: parameters that only some ranks use, of which the others would send less, overlap that can be switched
off, views, and main gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from harness.candidate import Candidate
from harness.data_parallel import DataParallel
from harness.groups import device_mesh
from reference.data_parallel import DataParallelCase, trained
from reference.dtypes import format_of
from reference.layout import Split, cut
from reference.mesh import Mesh
from reference.traffic import Transfer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class TorchFsdp(Candidate):
    """torch.distributed.fsdp.fully_shard around the whole network."""

    name: ClassVar[str] = "torch-fsdp"
    requires: ClassVar[tuple[str, ...]] = ("torch",)
    supports = (
        "data_parallel_any_axis",
        "data_parallel_no_sync",
        "data_parallel_sync_every",
        "data_parallel_sum",
        "data_parallel_reduce_dtype",
        "data_parallel_order",
        "data_parallel_tied",
        "data_parallel_frozen",
    )

    def open(self, mesh: Mesh) -> None:
        self.device_mesh: DeviceMesh = device_mesh(mesh)

    def traffic(self, case: Any, needed: Sequence[Transfer]) -> Sequence[Transfer]:
        """One reduce-scatter, of what is padded so that every rank has as many rows."""
        if not isinstance(case, DataParallelCase) or not needed:
            return needed
        n = case.parallel_size
        elements = sum(n * cut(shape[0], n, "chunk")[0] * math.prod(shape[1:]) for shape in trained(case).values())
        first = needed[0]
        return [
            Transfer("backward", one.micro_batch, "reduce_scatter", one.axis, elements, first.dtype) for one in needed
        ]

    def data_parallel(self, case: DataParallelCase, module: nn.Module) -> DataParallel:
        policy = MixedPrecisionPolicy(
            reduce_dtype=None if case.reduce_dtype == "same" else format_of(case.reduce_dtype).torch_dtype
        )
        wrapped = fully_shard(module, mesh=self.device_mesh[case.axis], mp_policy=policy)
        assert isinstance(wrapped, FSDPModule)
        if case.reduction == "sum":
            wrapped.set_gradient_divide_factor(1.0)
            wrapped.set_force_sum_reduction_for_comms(True)  # gloo has no other

        @contextmanager
        def no_sync() -> Iterator[None]:
            wrapped.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                wrapped.set_requires_gradient_sync(True)

        return DataParallel(module, no_sync=no_sync, layout=Split(0, case.axis, rule="chunk"))
