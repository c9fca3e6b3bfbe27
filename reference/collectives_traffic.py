"""The collectives on the wire of a differentiable collective and its conjugate: one, or none, in each direction."""

from __future__ import annotations

import math

from reference.collectives import CollectivesCase, Kind
from reference.traffic import Operation, Phase, Transfer, piece, worth_sending

_FORWARD: dict[Kind, Operation] = {
    "reduce": "all_reduce",
    "gather": "all_gather",
    "gather_sequence": "all_gather",
    "reduce_scatter": "reduce_scatter",
}
_BACKWARD: dict[Kind, Operation] = {
    "copy": "all_reduce",
    "scatter": "all_gather",
    "gather_sequence": "reduce_scatter",
    "reduce_scatter": "all_gather",
}


def needed(case: CollectivesCase) -> tuple[Transfer, ...]:
    """Every collective, tensor by tensor."""
    made, n = [], case.parallel_size
    dtype = str(case.format.torch_dtype).removeprefix("torch.")
    for m, shape in enumerate(case.shapes):
        whole, length = math.prod(shape), shape[case.dim]
        elements = {
            "all_reduce": whole,
            "all_gather": whole // length * piece(length, n),
            "reduce_scatter": whole // length * piece(length, n) * n,
        }
        phases: tuple[tuple[Phase, dict[Kind, Operation]], ...] = (("forward", _FORWARD), ("backward", _BACKWARD))
        for phase, table in phases:
            if case.kind in table and (phase == "forward" or case.trains):
                operation = table[case.kind]
                made.append(Transfer(phase, m, operation, case.axis, elements[operation], dtype))
    return worth_sending(made, case.mesh)
