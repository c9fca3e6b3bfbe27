"""What a linear layer's results would be with each of the known mistakes, and the diagnosis that compares them.

Written out in elementary numpy, as `reference/linear.py` writes the right values. Legend: R replicas, T token
dimensions, I in_features, O out_features (i, o one rank's piece of them).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from harness.observation import Observation
from harness.oracle.diagnose import Diagnosis, diagnose, evidence_of
from harness.oracle.patterns.evidence import Suspect
from harness.properties.base import Description
from reference.layout import Layout, Rule, cut
from reference.linear import LinearCase, expected, tensors

Values = NDArray[np.float64]


def explain(
    case: LinearCase,
    description: Description,
    name: str,
    observed: Sequence[Observation],
    layout: Layout,
    want: Values | None,
    tolerance: Values | None,
    dtype: str,
) -> Diagnosis | None:
    """Why tensor ``name`` is not ``want`` (global, float64) on the ranks.

    layout, dtype: as compared. tolerance: of the global shape, how far off an element may be; None where it must be
    exact. None where nothing is wrong, or where there are no numbers to compare.
    """
    given = {key: tensor.numpy() for key, tensor in tensors(case).items()}
    made = {key: tensor.numpy() for key, tensor in expected(case, tensors(case)).items() if tensor is not None}
    evidence = evidence_of(
        name,
        observed,
        layout,
        case.mesh,
        want,
        tolerance,
        dtype,
        others={**given, **made},
        micro_batches=len(case.leading),
        suspects=lambda: suspects(case, given, name, description.uneven),
    )
    return None if evidence is None else diagnose(evidence)


def suspects(case: LinearCase, given: dict[str, Values], name: str, uneven: Rule = "balanced") -> list[Suspect]:
    """The wrong values that known mistakes give for a result: ``output[m]``, ``output_bias[m]``, ``input[m].grad``,
    ``weight.grad``, ``bias.grad``; none for other names. given: the case's tensors, float64. uneven: how the candidate
    cuts what is not divisible."""
    base, _, rest = name.partition("[")
    m = int(rest.partition("]")[0]) if rest else 0
    layer = _Layer(case, given, uneven)
    if name.endswith(".grad"):
        makers = {"input": _input_grad, "weight": _parameter_grad, "bias": _parameter_grad}
        made = makers[base.removesuffix(".grad")](layer, name, m) if base.removesuffix(".grad") in makers else ()
    else:
        made = _output(layer, m) if base == "output" else _output_bias(layer) if base == "output_bias" else ()
    return list(made)


@dataclass(frozen=True)
class _Layer:
    """The case with what the mistakes are made of; every array is [R, ...] and a rank's replica counts."""

    case: LinearCase
    given: dict[str, Values]
    uneven: Rule

    @property
    def n(self) -> int:
        return self.case.parallel_size

    @property
    def axis(self) -> str:
        return self.case.axis

    @property
    def column(self) -> bool:
        return self.case.kind == "column"

    @property
    def micro_batches(self) -> range:
        return range(len(self.case.leading))

    @cached_property
    def pieces(self) -> list[slice]:
        """Of the features that are cut, each coordinate's."""
        return self._slices(self.case.out_features if self.column else self.case.in_features)

    def tokens(self, m: int) -> list[slice]:
        """Of the first token dimension of a micro-batch, each coordinate's under sequence parallelism."""
        return self._slices(self.case.leading[m][0])

    def _slices(self, length: int) -> list[slice]:
        ends = np.cumsum([0, *cut(length, self.n, self.uneven)])
        return [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]

    def x(self, m: int) -> Values:
        return self.given[f"input[{m}]"]

    def g(self, m: int) -> Values:
        return self.given[f"output[{m}].grad"]

    def per_rank(self, value: Callable[[int], Values]) -> tuple[Values, ...]:
        """``value`` of each rank's coordinate along the layer's axis."""
        made = [value(c) for c in range(self.n)]
        return tuple(made[self.case.mesh.coordinate(rank, self.axis)] for rank in range(self.case.mesh.size))

    def summed_elsewhere(self, part: Callable[[int], Values]) -> Iterator[tuple[str, tuple[Values, ...]]]:
        """The sums of the ranks' own parts [R, ...] over other groups than the layer's, by what the group is called."""
        mesh, parts = self.case.mesh, [part(c) for c in range(self.n)]
        own = [
            parts[mesh.coordinate(rank, self.axis)][mesh.coordinate(rank, self.case.replica_axes)]
            for rank in range(mesh.size)
        ]
        axes: list[tuple[str, str | tuple[str, ...]]] = [(a, a) for a in mesh.names if a != self.axis]
        several = sum(size > 1 for _, size in mesh.axes) > 1
        for label, over in [*axes, *([("all ranks", mesh.names)] if several else [])]:
            if mesh.axis_size(over) > 1:
                sums = (sum((own[q] for q in mesh.group_of(r, over)), np.zeros(())) for r in range(mesh.size))
                yield label, tuple(np.broadcast_to(s, (self.case.replicas, *s.shape)) for s in sums)

    @property
    def or_dropped(self) -> str:
        """What else a missing sum may be where the data is not contiguous, or where the default group has one rank."""
        more = ", or reduces a contiguous copy and returns the original" if self.case.transposed else ""
        if self.axis != "tp" and self.case.mesh.axis_size("tp") == 1:
            more += f", or is done over tp, a group of one rank, instead of {self.axis}"
        return more


def _output(layer: _Layer, m: int) -> Iterator[Suspect]:
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


def _output_bias(layer: _Layer) -> Iterator[Suspect]:
    """output_bias[m], [R, O]."""
    bias = np.broadcast_to(layer.given["bias"], (layer.case.replicas, layer.case.out_features))
    if layer.n > 1:
        yield Suspect(f"is {layer.n} times the bias: summed over {layer.axis}", layer.n * bias)
        yield Suspect(f"is 1/{layer.n} of the bias: divided by the size of {layer.axis}", bias / layer.n)


def _input_grad(layer: _Layer, name: str, m: int) -> Iterator[Suspect]:
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


def _parameter_grad(layer: _Layer, name: str, _: int) -> Iterator[Suspect]:
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


def _accumulated(layer: _Layer, of: Callable[[int], Values], right: Values) -> Iterator[Suspect]:
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


def _repeated(layer: _Layer, name: str, right: Values) -> Iterator[Suspect]:
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


def _other_gradients(layer: _Layer, of: Callable[[int], Values], m: int) -> Iterator[Suspect]:
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
