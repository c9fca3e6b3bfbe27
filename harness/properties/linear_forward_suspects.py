"""What a linear layer's outputs would be with each of the known mistakes.

Written out in elementary numpy, as `reference/linear.py` writes the right values. Legend: R replicas, T token
dimensions, O out_features.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.oracle.patterns.evidence import Suspect
from harness.properties.linear_pieces import Layer, Values


def output(layer: Layer, m: int) -> Iterator[Suspect]:
    """output[m], [R, T, O]."""
    case, n, axis, w = layer.case, layer.n, layer.axis, layer.given["weight"]
    product = layer.x(m) @ w.T
    bias = layer.given.get("bias", np.zeros(case.out_features))
    added = np.zeros(case.out_features) if case.skip_bias_add else bias
    right = product + added
    if case.bias and case.skip_bias_add:
        yield Suspect("has the bias already, which skip_bias_add leaves to the caller", product + bias)
    if case.bias and not case.skip_bias_add:
        yield Suspect("lacks the bias", product)
    if n == 1:
        return
    if layer.column:
        if case.bias and case.gather_output:
            yield Suspect(f"has the bias {n} times, once for each rank of {axis}", product + n * added)
        return
    if case.bias:
        yield Suspect(f"has the bias {n} times: added on every rank before the sum over {axis}", product + n * bias)
        yield Suspect(f"has 1/{n} of the bias: divided by the size of {axis} and not summed", product + added / n)

    def part(c: int) -> Values:
        return layer.x(m)[..., layer.pieces[c]] @ w[:, layer.pieces[c]].T

    what = "a reduce-scatter" if case.sequence_parallel else "an all-reduce"
    yield Suspect(
        f"equals the rank's own part before the sum over {axis}: {what} is missing in forward"
        f", or not waited for{layer.or_dropped}",
        layer.per_rank(lambda c: part(c) + added),
    )
    yield Suspect(f"is averaged over {axis} where a sum is due", product / n + added)
    yield Suspect(f"is averaged over {axis}, with the bias, where a sum is due", right / n)
    yield Suspect(f"is summed over {axis} twice", n * product + added)
    for label, sums in layer.summed_elsewhere(part):
        yield Suspect(f"is summed over {label} instead of {axis}", tuple(total + added for total in sums))


def output_bias(layer: Layer) -> Iterator[Suspect]:
    """output_bias[m], [R, O]."""
    bias = np.broadcast_to(layer.given["bias"], (layer.case.replicas, layer.case.out_features))
    if layer.n > 1:
        yield Suspect(f"is {layer.n} times the bias: summed over {layer.axis}", layer.n * bias)
        yield Suspect(f"is 1/{layer.n} of the bias: divided by the size of {layer.axis}", bias / layer.n)
