"""The collectives that a layer's algebra needs, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from reference.mesh import Mesh

#: As in torch.distributed, without the name of the form.
Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
#: When it is due: in the forward or the backward of a micro-batch, or once after the last backward.
Phase = Literal["forward", "backward", "finish"]


@dataclass(frozen=True)
class Transfer:
    """One collective along ``axis``, in one phase of one micro-batch (0 for ``finish``).

    elements: that each rank gives: of an all-reduce, a reduce-scatter and a broadcast the whole tensor, of an
    all-gather its piece; where a cut is uneven, with the padding to the longest piece. least: without any, where that
    is less. dtype: torch's name. optional: a right implementation may do without, or do it elsewhere.
    """

    phase: Phase
    micro_batch: int
    operation: Operation
    axis: str
    elements: int
    dtype: str
    optional: bool = False
    least: int | None = None

    def fits(self, elements: int) -> bool:
        """Whether a payload of so many elements is this collective's."""
        return (self.elements if self.least is None else self.least) <= elements <= self.elements


@dataclass(frozen=True)
class Load:
    """What one rank sends to others and receives from them point to point: elements or bytes."""

    sent: int
    received: int

    def __add__(self, other: Load) -> Load:
        return Load(self.sent + other.sent, self.received + other.received)

    def times(self, factor: int) -> Load:
        return Load(self.sent * factor, self.received * factor)


def gathers(
    phase: Phase, micro_batch: int, axis: str, dtype: str, length: int, rest: int, parts: int, optional: bool = False
) -> Transfer:
    """An all-gather of a dimension of ``length`` that is cut into ``parts``; rest: the product of the others."""
    least = None if length % parts == 0 else 0  # one way of cutting leaves the last ranks none
    elements = math.ceil(length / parts) * rest
    return Transfer(phase, micro_batch, "all_gather", axis, elements, dtype, optional, least)


def reduce_scatters(
    phase: Phase, micro_batch: int, axis: str, dtype: str, length: int, rest: int, parts: int
) -> Transfer:
    """A reduce-scatter of such a dimension."""
    elements = math.ceil(length / parts) * parts * rest
    return Transfer(phase, micro_batch, "reduce_scatter", axis, elements, dtype, least=length * rest)


def worth_sending(transfers: list[Transfer], mesh: Mesh) -> tuple[Transfer, ...]:
    """Without those of groups of one rank, which move nothing."""
    return tuple(one for one in transfers if mesh.axis_size(one.axis) > 1)
