"""The collectives that a layer's algebra needs, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from reference.mesh import Mesh

#: As in torch.distributed, without the name of the form.
Operation = Literal["all_reduce", "all_gather", "reduce_scatter"]
#: When it is due: in the forward or the backward of a micro-batch, or once after the last backward.
Phase = Literal["forward", "backward", "finish"]


@dataclass(frozen=True)
class Transfer:
    """One collective along ``axis``, in one phase of one micro-batch (0 for ``finish``).

    elements: that each rank gives: of an all-reduce and a reduce-scatter the whole tensor, of an all-gather its piece.
    dtype: torch's name. optional: a right implementation may do without, or do it
    elsewhere.
    """

    phase: Phase
    micro_batch: int
    operation: Operation
    axis: str
    elements: int
    dtype: str
    optional: bool = False


def piece(length: int, parts: int) -> int:
    """The longest of the pieces of a dimension that is cut: the shorter ones travel padded, or as they are."""
    return math.ceil(length / parts)


def worth_sending(transfers: list[Transfer], mesh: Mesh) -> tuple[Transfer, ...]:
    """Without those of groups of one rank, which move nothing."""
    return tuple(one for one in transfers if mesh.axis_size(one.axis) > 1)
