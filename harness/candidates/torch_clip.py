"""``torch.nn.utils.clip_grad_norm_``, as the candidate ``torch`` offers it: with DTensors over the mesh where gradients
are cut, with plain tensors where none is.

Not offered: stages of a pipeline, of which DTensor knows nothing; bf16 and fp16, in which it keeps the norm; a loss
scale, which its GradScaler divides out before; skipping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from harness.clip import Clipper
from reference.clip import ClipCase, has_empty_piece

CLIP_FEATURES = (
    "clip_eps",
    "clip_fp64",
    "clip_sharded",
    "clip_mixed_sharding",
    "clip_uneven",
    "clip_missing",
    "clip_raise",
)


def clip_grad_norm(
    case: ClipCase, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh, known_fault: Callable[[str], None]
) -> Clipper:
    """All parameters with a gradient, given to clip_grad_norm_ at once."""
    if case.nonfinite == "nan" and case.norm_type == "inf" and case.mesh.size > 1:
        known_fault("the inf norm of DTensors: NaN is lost in gloo's maximum")
    if case.norm_type == "inf" and has_empty_piece(case):
        known_fault("the inf norm of DTensors, one of which is empty on a rank: raises there")
    made: dict[str, nn.Parameter] = {}
    cut = any(one.split or one.sharded for one in case.parameters)
    for i, one in enumerate(case.parameters):
        own = parameters[f"parameter{i}"]
        if not cut:
            made[f"parameter{i}"] = own
            continue
        names = mesh.mesh_dim_names or ()
        where = {"tp": one.split, "dp": one.sharded}
        placements: list[Placement] = [Shard(0) if where.get(name) else Replicate() for name in names]
        whole = nn.Parameter(_whole(own.detach(), mesh, placements, one.size), own.requires_grad)
        # DTensor's programs have the same gradients on all ranks: where one has none, it has zeros.
        values = torch.zeros_like(own) if own.grad is None and case.has_gradient(i) else own.grad
        whole.grad = None if values is None else _whole(values, mesh, placements, one.size)
        made[f"parameter{i}"] = whole

    def clip() -> torch.Tensor:
        norm: Any = nn.utils.clip_grad_norm_(
            list(made.values()), case.asked_limit, case.asked_norm_type, error_if_nonfinite=case.policy == "raise"
        )
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def gradient(name: str) -> torch.Tensor | None:
        found = made[name].grad
        return found.to_local() if isinstance(found, DTensor) else found

    return Clipper(clip, gradient=gradient)


def _whole(local: torch.Tensor, mesh: DeviceMesh, placements: list[Placement], size: int) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size((size,)), stride=(1,))
