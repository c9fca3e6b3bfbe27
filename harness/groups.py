"""Process groups of a mesh, for adapters whose library takes groups from its caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from reference.mesh import Mesh, as_lists

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def new_group(mesh: Mesh, axes: str | Sequence[str]) -> dist.ProcessGroup:
    """This rank's group along an axis, or combined axes. Every rank must call it, in the same order.

    Raises ValueError where the mesh does not fit the world.
    """
    mesh.require_world(dist.get_world_size())
    mine: dist.ProcessGroup | None = None
    for ranks in as_lists(mesh.groups(axes)):
        group = dist.new_group(ranks)
        mine = group if dist.get_rank() in ranks else mine
    assert mine is not None
    return mine


def device_mesh(mesh: Mesh, device: str = "cpu") -> DeviceMesh:
    """The mesh as torch's DeviceMesh with the same axis names and ranks. Every rank must call it.

    torch's last dimension varies fastest, ours the first, so the dimensions are in reverse order.
    """
    from torch.distributed.device_mesh import init_device_mesh

    mesh.require_world(dist.get_world_size())
    axes = mesh.axes or (("tp", 1),)
    names = tuple(name for name, _ in reversed(axes))
    return init_device_mesh(device, tuple(size for _, size in reversed(axes)), mesh_dim_names=names)
