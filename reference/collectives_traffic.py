"""The collectives on the wire of a differentiable collective and its conjugate: one, or none, in each direction."""

from __future__ import annotations

import math

from reference.collectives import CollectivesCase, Kind
from reference.traffic import Operation, Phase, Transfer, gathers, reduce_scatters, worth_sending

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
    made: list[Transfer] = []
    dtype = str(case.format.torch_dtype).removeprefix("torch.")
    for m, shape in enumerate(case.shapes):
        length = shape[case.dim]
        cut = (case.axis, dtype, length, math.prod(shape) // length, case.parallel_size)
        phases: tuple[tuple[Phase, dict[Kind, Operation]], ...] = (("forward", _FORWARD), ("backward", _BACKWARD))
        for phase, table in phases:
            operation = table.get(case.kind) if phase == "forward" or case.trains else None
            if operation == "all_reduce":
                made.append(Transfer(phase, m, operation, case.axis, math.prod(shape), dtype))
            elif operation is not None:
                made.append((gathers if operation == "all_gather" else reduce_scatters)(phase, m, *cut))
    return worth_sending(made, case.mesh)
