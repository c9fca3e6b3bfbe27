"""What the known mistakes give for a reduction."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from harness.oracle.patterns.evidence import Suspect, Values
from reference.all_reduce import AllReduceCase, Tensors, by_group, expected, layouts
from reference.layout import window


def suspects(case: AllReduceCase, given: Tensors, name: str) -> Iterator[Suspect]:
    """Of ``output[m]``: not reduced, its tail not reduced, another reduction, a factor, another group."""
    n, axis = case.parallel_size, case.axis
    if n == 1 or case.operation == "all_gather":
        return
    right = expected(case, given)[name]
    assert right is not None
    x = given[name.replace("output", "input")]
    with np.errstate(all="ignore"):
        yield from _unreduced(case, x.numpy(), right.numpy())
        yield from _other_reductions(case, x, right)
    everyone = x.sum(0) if case.reduction in ("sum", "avg") else x.amax(0) if case.reduction == "max" else x.amin(0)
    if case.reduction == "avg":
        everyone = everyone / n
    if case.mesh.size > n:
        whole = everyone.reshape(right.shape[1:]).expand(right.shape)
        yield Suspect(f"is reduced over all ranks, and not over {axis} alone", whole.numpy().copy())


def _unreduced(case: AllReduceCase, x: Values, right: Values) -> Iterator[Suspect]:
    """Each rank's own values, wholly or where a balanced cut is longer than length // n."""
    n, layout = case.parallel_size, layouts(case)["output"]
    own: list[Values] = []
    tails: list[Values] = []
    for rank in range(case.mesh.size):
        group = case.mesh.coordinate(rank, case.replica_axes)
        alone = x[case.mesh.coordinate(rank, case.mesh.names)].reshape(right.shape[1:])
        mixed = right[group].copy().reshape(-1)
        reached = mixed.size // n * n
        mixed[reached:] = alone.reshape(-1)[reached:]
        for made, values in ((own, alone), (tails, mixed.reshape(alone.shape))):
            whole = np.repeat(values[None], right.shape[0], axis=0)
            made.append(window(whole.shape, layout, case.mesh, rank).take(whole))
    yield Suspect("equals this rank's own input: it is not reduced", tuple(own))
    yield Suspect(
        f"equals this rank's own input past {n} times length // {n} elements: the tail is not reduced",
        tuple(tails),
    )


def _other_reductions(case: AllReduceCase, x: torch.Tensor, right: torch.Tensor) -> Iterator[Suspect]:
    n, parts = case.parallel_size, by_group(case, x)
    due = {"sum": "the sum", "avg": "the mean", "max": "the maximum", "min": "the minimum"}
    made = {"sum": parts.sum(1), "avg": parts.sum(1) / n, "max": parts.amax(1), "min": parts.amin(1)}
    for reduction, values in made.items():
        if reduction != case.reduction:
            cause = f"is {due[reduction]} over {case.axis}, where {due[case.reduction]} is due"
            yield Suspect(cause, values.reshape(right.shape).numpy())
    if case.reduction == "avg":
        yield Suspect(f"is divided by {n} twice", (right / n).numpy())
    if case.reduction == "sum":
        yield Suspect(f"is {n} times too large: summed over {case.axis} twice", (n * right).numpy())
