"""What a linear layer's gradients would be with each of the known mistakes.

Written out in elementary numpy, as `reference/linear.py` writes the right values. Legend: R replicas, T token
dimensions, I in_features, O out_features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from harness.oracle.patterns.evidence import Suspect
from harness.properties.linear_pieces import Layer, Values


def input_grad(layer: Layer, name: str, m: int) -> Iterator[Suspect]:
    """input[m].grad, [R, T, I]."""
    case, n, axis, w = layer.case, layer.n, layer.axis, layer.given["weight"]
    right = layer.g(m) @ w
    yield from _other_gradients(layer, lambda k: layer.g(k) @ w, m)
    if n == 1:
        return
    yield from _repeated(layer, name, right)
    if layer.column:

        def part(c: int) -> Values:
            return layer.g(m)[..., layer.pieces[c]] @ w[layer.pieces[c]]

        what = "a reduce-scatter" if case.sequence_parallel else "an all-reduce"
        yield Suspect(
            f"equals the rank's own part before the sum over {axis}: {what} is missing in backward"
            f", or not waited for{layer.or_dropped}",
            layer.per_rank(part),
        )
        for label, sums in layer.summed_elsewhere(part):
            yield Suspect(f"is summed over {label} instead of {axis} in backward", sums)
    elif case.sequence_parallel:
        yield Suspect(
            f"has only the rank's own tokens: the output gradient is not gathered over {axis} in backward",
            layer.per_rank(lambda c: _only(right, 1, layer.tokens(m)[c])),
        )
    elif not case.input_is_parallel:
        yield Suspect(
            f"has only the rank's own features: the pieces are not gathered over {axis} in backward",
            layer.per_rank(lambda c: _only(right, -1, layer.pieces[c])),
        )


def parameter_grad(layer: Layer, name: str, _: int) -> Iterator[Suspect]:
    """weight.grad [R, O, I] or bias.grad [R, O]."""
    case, n, axis, weight = layer.case, layer.n, layer.axis, name.startswith("weight")

    def of(m: int, tokens: slice = slice(None), inputs: int | None = None) -> Values:
        """What the micro-batch gives, of some tokens, with its own input or that of another one."""
        g = layer.g(m)[:, tokens].reshape(case.replicas, -1, case.out_features)
        if not weight:
            return np.asarray(g.sum(1))
        x = layer.x(m if inputs is None else inputs)[:, tokens].reshape(case.replicas, -1, case.in_features)
        return np.asarray(g.swapaxes(1, 2) @ x)

    def total(value: Callable[[int], Values]) -> Values:
        return np.asarray(sum((value(m) for m in layer.micro_batches), np.zeros(())))

    yield from _accumulated(layer, of, total(of))
    if weight and len({*case.leading}) == 1 and len(case.leading) > 1 and case.backward in ("delayed", "reversed"):
        last = len(case.leading) - 1
        yield Suspect(
            "is computed with the last micro-batch's input for every micro-batch: the input is kept on the module",
            total(lambda m: of(m, inputs=last)),
        )
    if case.replicas > 1:
        everyone = np.broadcast_to(total(of).sum(0, keepdims=True), total(of).shape)
        outside = " x ".join(a for a in case.replica_axes if case.mesh.axis_size(a) > 1)
        yield Suspect(f"is summed over {outside} too, which is left to the caller", everyone)
        yield Suspect(f"is averaged over {outside}, which is left to the caller", everyone / case.replicas)
    if n == 1:
        return
    yield from _repeated(layer, name, total(of))
    if case.sequence_parallel and (weight or not layer.column):
        why = (
            f"the {'input' if layer.column else 'output gradient'} is not gathered over {axis}"
            if weight
            else f"the sum over {axis} is missing"
        )
        yield Suspect(
            f"covers only the rank's own tokens: {why} in backward",
            layer.per_rank(lambda c: total(lambda m: of(m, layer.tokens(m)[c]))),
        )


def _accumulated(layer: Layer, of: Callable[[int], Values], right: Values) -> Iterator[Suspect]:
    """Mistakes in adding up micro-batches."""
    count = len(layer.micro_batches)
    if count == 1:
        return
    for m in layer.micro_batches:
        last = {"immediate": count - 1, "delayed": count - 1, "reversed": 0}.get(layer.case.backward)
        why = "overwritten instead of accumulated" if m == last else "the others are not accumulated"
        yield Suspect(f"has the contribution of micro-batch {m} alone: {why}", of(m))
        if count > 2:
            yield Suspect(f"lacks the contribution of micro-batch {m}", right - of(m))
        yield Suspect(f"has the contribution of micro-batch {m} twice", right + of(m))
    yield Suspect("is averaged over the micro-batches where a sum is due", right / count)


def _repeated(layer: Layer, name: str, right: Values) -> Iterator[Suspect]:
    """The whole gradient times or over the size of the group, by the layer's usual reasons."""
    case, n, axis = layer.case, layer.n, layer.axis
    if case.gather_output:
        why = f"the backward of the gather sums {n} equal gradients (a reduce-scatter) where each rank keeps its piece"
    elif layer.column:
        why = f"summed over {axis} once more"
    elif name.startswith("bias"):
        why = f"summed over {axis} where every rank has the whole gradient"
    else:
        why = f"the backward of the sum over {axis} reduces again {n} equal gradients"
    yield Suspect(f"is {n} times too large: {why}", n * right)
    if name.startswith("bias") and not layer.column:
        small = f"the bias is divided by the size of {axis} in the graph, or its gradient averaged over {axis}"
    else:
        small = f"averaged over {axis} where a sum is due"
    yield Suspect(f"is 1/{n} of what it should be: {small}", right / n)


def _other_gradients(layer: Layer, of: Callable[[int], Values], m: int) -> Iterator[Suspect]:
    """The result of another micro-batch that has this one's shape."""
    for k in layer.micro_batches:
        if k != m and layer.case.leading[k] == layer.case.leading[m]:
            yield Suspect(f"is that of micro-batch {k}: a buffer is shared between micro-batches", of(k))
            if layer.case.backward != "never":
                yield Suspect(f"has that of micro-batch {k} added: a buffer is not cleared", of(k) + of(m))


def _only(values: Values, dim: int, kept: slice) -> Values:
    """The values with zeros outside a slice of one dimension."""
    held = np.zeros(values.shape)
    at: list[slice] = [slice(None)] * values.ndim
    at[dim] = kept
    held[tuple(at)] = values[tuple(at)]
    return held
