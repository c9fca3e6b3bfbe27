"""The collectives that vocabulary-parallel cross entropy needs (Megatron-LM, arXiv 1909.08053, section 3).

T tokens: forward three all-reduces of T, of the maximum, the target's logit and the sum of exponentials, and none
backward: each rank has all that its columns of the gradient are made of.
"""

from __future__ import annotations

import math

from reference.cross_entropy import CrossEntropyCase
from reference.traffic import Transfer, worth_sending


def needed(case: CrossEntropyCase) -> tuple[Transfer, ...]:
    """Every collective, micro-batch by micro-batch."""
    dtype = str(case.loss_format.torch_dtype).removeprefix("torch.")
    made = [
        Transfer("forward", m, "all_reduce", case.axis, math.prod(dims), dtype)
        for m, dims in enumerate(case.leading)
        for _ in range(3)
    ]
    return worth_sending(made, case.mesh)
