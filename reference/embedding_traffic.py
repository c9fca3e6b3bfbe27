"""The collectives that a vocabulary-parallel embedding needs (Megatron-LM, arXiv 1909.08053, section 3).

T tokens, H hidden: one all-reduce T x H forward, and none backward, since all ranks have the whole gradient; under
sequence parallelism a reduce-scatter T x H forward, and an all-gather of the pieces where the table trains.
"""

from __future__ import annotations

import math

from reference.embedding import EmbeddingCase
from reference.traffic import Transfer, piece, worth_sending


def needed(case: EmbeddingCase) -> tuple[Transfer, ...]:
    """Every collective, micro-batch by micro-batch."""
    n, made = case.parallel_size, []
    dtype = str(case.format.torch_dtype).removeprefix("torch.")
    for m, dims in enumerate(case.leading):
        rest = math.prod(dims[1:]) * case.hidden
        if case.sequence_parallel:
            own = piece(dims[0], n) * rest
            made.append(Transfer("forward", m, "reduce_scatter", case.axis, n * own, dtype))
            if case.trains:
                made.append(Transfer("backward", m, "all_gather", case.axis, own, dtype))
        else:
            made.append(Transfer("forward", m, "all_reduce", case.axis, dims[0] * rest, dtype))
    return worth_sending(made, case.mesh)
