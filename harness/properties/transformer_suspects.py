"""What a transformer layer's outputs and gradients would be with each of the known mistakes.

The layer of one process is run with one thing changed, and gradients are autograd's. ``c`` is a rank's coordinate along
the layer's axis; legend as in `reference/transformer_layer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness.oracle.patterns.evidence import Suspect, Values
from harness.properties.transformer_pieces import Layer
from reference.transformer import Tensors, TransformerCase
from reference.transformer_layer import Change, attend, feed

#: Of what every rank holds and uses for its own tokens only, under sequence parallelism.
_OF_TOKENS = ("norm1_weight", "norm1_bias", "norm2_weight", "norm2_bias", "o_bias", "down_bias")
_OF_HEADS = ("q_norm_weight", "k_norm_weight")
_OF_KV_HEADS = ("k_weight", "k_bias", "v_weight", "v_bias")
_BEFORE_ATTENTION = ("norm1_weight", "norm1_bias", "input")
_BEFORE_MLP = ("norm2_weight", "norm2_bias", "o_weight", "o_bias", *_BEFORE_ATTENTION)


def suspects(case: TransformerCase, given: Tensors, name: str) -> list[Suspect]:
    """The wrong values that known mistakes give for ``output[m]``, ``input[m].grad`` or a parameter's gradient."""
    layer, (base, _, rest) = Layer(case, given), name.removesuffix(".grad").partition("[")
    if base == "output":
        return list(_outputs(layer, int(rest.partition("]")[0])))
    made = [] if rest else list(_accumulated(layer, name))
    if layer.n > 1:
        made += [*_partial(layer, name, base), *_upstream(layer, name, base)]
    return made


def _outputs(layer: Layer, m: int) -> Iterator[Suspect]:
    case, n, axis, p, x = layer.case, layer.n, layer.axis, layer.parameters, layer.given[f"input[{m}]"]
    if n == 1:
        return
    whole = {("o",): "attention", ("down",): "the mlp", ("o", "down"): "attention and of the mlp"}
    for names, whose in whole.items() if case.bias else ():
        for factor, why in ((n, f"{n} times: added on every rank before the sum over {axis}"), (1 / n, f"times 1/{n}")):
            changed = {**p, **{f"{name}_bias": factor * p[f"{name}_bias"] for name in names}}
            z = feed(case, changed, attend(case, changed, x, m))
            yield Suspect(f"has the bias after {whose} {why}", z.numpy())

    def missing(whose: str) -> str:
        return f"has the rank's own part of {whose} before the sum over {axis}: {layer.sum} is missing in forward"

    def both(own: Change) -> Values:
        return feed(case, p, attend(case, p, x, m, own), own).numpy()

    y = attend(case, p, x, m)
    yield Suspect(missing("the mlp"), layer.each(("inner",), lambda own: feed(case, p, y, own).numpy(), zero=True))
    yield Suspect(missing("attention and of the mlp"), layer.each(("heads", "inner"), both, zero=True))
    if case.sequence_parallel:
        yield Suspect(missing("attention"), layer.each(("heads",), both, zero=True))
        return
    # Each rank goes on with what it has, and the sum over ranks after the mlp is right.
    alone = [attend(case, p, x, m, own) for own in layer.ways(("heads",), zero=True)]
    bias = p.get("down_bias", torch.zeros(()))
    inner = [feed(case, p, y, own) - y - bias for y, own in zip(alone, layer.ways(("inner",), zero=True), strict=True)]
    total = torch.stack(inner).sum(0) + bias
    yield Suspect(missing("attention"), layer.per_rank([(y + total).numpy() for y in alone]))


def _accumulated(layer: Layer, name: str) -> Iterator[Suspect]:
    for m, one in enumerate(layer.right) if len(layer.right) > 1 else ():
        alone = layer.of(name, [one])
        yield Suspect(f"has the contribution of micro-batch {m} alone: the others are not accumulated", alone)


def _partial(layer: Layer, name: str, base: str) -> Iterator[Suspect]:
    """Gradients of what several ranks hold, each of which saw its part: they are not summed over these ranks."""
    case, axis, holders = layer.case, layer.axis, layer.n
    own: Values | tuple[Values, ...]
    if base in _OF_TOKENS and case.sequence_parallel:
        part, own = "tokens", layer.per_rank(layer.of_own_tokens(name))
    elif base in _OF_HEADS:
        part, own = "heads", layer.per_rank(layer.of_own_heads(name))
    elif base in _OF_KV_HEADS and case.kv_copies > 1:
        part, own, holders = "query heads", layer.per_rank(layer.of_own_heads(name)), case.kv_copies
    else:
        return
    over = f"over {axis}" if holders == layer.n else f"over the {holders} ranks of {axis} that hold it"
    right = layer.of(name, layer.right)
    yield Suspect(f"covers only the rank's own {part}: the sum {over} after the last backward is missing", own)
    yield Suspect(f"is averaged {over} where a sum is due: 1/{holders} of what it should be", right / holders)
    yield Suspect(f"is summed {over} once more: {holders} times what it should be", right * holders)


def _upstream(layer: Layer, name: str, base: str) -> Iterator[Suspect]:
    """A gradient into one half of the layer lacks the other ranks' part: then all that lies before it is wrong."""
    case = layer.case
    shared = "the key/value heads that several ranks hold"
    for whose, before, where in (
        ("the mlp", _BEFORE_MLP, ("inner",)),
        ("attention", _BEFORE_ATTENTION, ("queries", "keys", "values")),
        (shared, _BEFORE_ATTENTION if case.kv_copies > 1 else (), ("keys", "values")),
    ):
        if base in before:
            cause = f"lacks the other ranks' part of the gradient into {whose}: "
            cause += f"{layer.sum} over {layer.axis} is missing in backward"
            yield Suspect(cause, layer.each(where, lambda own: layer.of(name, layer.gradients(own))))
