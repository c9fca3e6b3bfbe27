"""The collectives that a vocabulary-parallel embedding needs (Megatron-LM, arXiv 1909.08053, section 3).

T tokens, H hidden: one all-reduce T x H forward, and none backward, since all ranks have the whole gradient; under
sequence parallelism a reduce-scatter T x H forward, and an all-gather of the pieces where the table trains.
"""

from __future__ import annotations

import math

from reference.embedding import EmbeddingCase
from reference.traffic import Transfer, gathers, reduce_scatters, worth_sending


def needed(case: EmbeddingCase) -> tuple[Transfer, ...]:
    """Every collective, micro-batch by micro-batch."""
    n, made = case.parallel_size, []
    dtype = str(case.format.torch_dtype).removeprefix("torch.")
    for m, dims in enumerate(case.leading):
        rest = math.prod(dims[1:]) * case.hidden
        if case.sequence_parallel:
            made.append(reduce_scatters("forward", m, case.axis, dtype, dims[0], rest, n))
            if case.trains:
                made.append(gathers("backward", m, case.axis, dtype, dims[0], rest, n))
        else:
            made.append(Transfer("forward", m, "all_reduce", case.axis, dims[0] * rest, dtype))
    return worth_sending(made, case.mesh)
