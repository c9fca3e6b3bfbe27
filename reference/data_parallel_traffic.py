"""The reductions that data parallelism needs: every element that trains once, each time gradients are synchronised."""

from __future__ import annotations

import math

from reference.data_parallel import DataParallelCase, trained
from reference.traffic import Transfer, worth_sending


def needed(case: DataParallelCase) -> tuple[Transfer, ...]:
    """One all-reduce of all elements for each synchronised micro-batch k = step * M + m. In how many pieces it goes is
    up to the implementation, and so is whether it happens in backward or after it."""
    elements = sum(math.prod(shape) for shape in trained(case).values())
    dtype = str(case.reduced_in.torch_dtype).removeprefix("torch.")
    made = [Transfer("backward", k, "all_reduce", case.axis, elements, dtype) for k in synchronised(case)]
    return worth_sending(made, case.mesh)


def synchronised(case: DataParallelCase) -> list[int]:
    """The micro-batches after which gradients are reduced."""
    total, last = case.steps * case.micro_batches, case.micro_batches - 1
    return [k for k in range(total) if case.sync == "every" or k % case.micro_batches == last]
