"""Differentiable collectives as DTensor has them: a local tensor enters with a placement, is redistributed, and leaves
as a local one; its gradient's placement says what backward sums."""

from __future__ import annotations

import math

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from reference.collectives import CollectivesCase

FEATURES = ("collectives_any_dim", "collectives_uneven", "collectives_any_axis")


def redistributed(case: CollectivesCase, mesh: DeviceMesh, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The collective of the case, of this rank's part of a tensor of ``shape``."""
    cut, alike, own = Shard(case.dim % len(shape)), Replicate(), Partial()
    enters: dict[str, Placement] = {"copy": alike, "scatter": alike, "gather": cut, "gather_sequence": cut}
    leaves: dict[str, Placement] = {"scatter": cut, "reduce_scatter": cut}
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    entered = DTensor.from_local(
        x, mesh, [enters.get(case.kind, own)], run_check=False, shape=torch.Size(shape), stride=stride
    )
    made = entered.redistribute(placements=[leaves.get(case.kind, alike)])
    each = [own] if case.kind in ("copy", "gather_sequence") else None  # its users are each rank's own
    return made.to_local(grad_placements=each)
