"""The transformer layer, and what its dropout makes of ones."""

from __future__ import annotations

from typing import Any

import torch

from harness.module import Sharded
from reference.attention import visible_keys
from reference.layout import Layout, Split, Whole
from reference.transformer import TransformerCase, shapes
from sharded.process_groups import ProcessGroups
from sharded.random import dropout
from sharded.transformer import TransformerLayer, finish_gradients


def transformer_layer(case: TransformerCase, groups: ProcessGroups) -> Sharded:
    layer = _layer(case, groups)
    masks = iter([_mask(case, m) for m in range(len(case.leading))])
    parts = dict[str, Any](norm1=layer.norm1, norm2=layer.norm2)
    parts |= dict(layer.attention.named_children()) | dict(layer.mlp.named_children())
    parameters: dict[str, torch.Tensor] = {}
    cuts: dict[str, Any] = {}
    for name in shapes(case):
        part, _, kind = name.rpartition("_")
        parameters[name], cuts[name] = getattr(parts[part], kind), _cut(case, part, kind)
    return Sharded(
        layer,
        forward=lambda x: layer(x, mask=next(masks)),
        parameters=parameters,
        finish=lambda: finish_gradients(layer),
        masks=("probabilities", "o", "down"),
        **cuts,
    )


def dropout_masks(case: TransformerCase, groups: ProcessGroups) -> dict[str, torch.Tensor]:
    layer, ones = _layer(case, groups), torch.ones(1024, dtype=case.format.torch_dtype)
    residual = layer._dropped(ones)
    if case.sequence_parallel:
        return {"sharded": residual}
    return {"replicated": residual, "sharded": dropout(ones, case.dropout, layer.tracker, "sharded")}


def _layer(case: TransformerCase, groups: ProcessGroups) -> TransformerLayer:
    return TransformerLayer(
        case.hidden,
        case.heads,
        case.ffn,
        kv_heads=case.kv_heads,
        norm=case.norm,
        activation=case.activation,
        qk_norm=case.qk_norm,
        rotary=case.rotary,
        recompute=case.recompute,
        attention_dropout=case.dropout,
        hidden_dropout=case.dropout,
        seed=case.seed,
        bias=case.bias,
        sequence_parallel=case.sequence_parallel,
        group=groups.group(case.axis) if case.explicit_group else None,
        main_grad=case.main_grad,
        dtype=case.format.torch_dtype,
    )


def _mask(case: TransformerCase, m: int) -> Any:
    """What the layer takes as the mask of a micro-batch."""
    tokens, sequences = case.leading[m]
    return {"causal": "causal", "none": None}.get(case.mask, visible_keys(tokens, sequences, m))


def _cut(case: TransformerCase, part: str, kind: str) -> Layout:
    if part in ("k", "v"):
        return Split(0, case.axis, copies=case.kv_copies)
    if part in ("q", "gate", "up"):
        return Split(0, case.axis)
    return Split(1, case.axis) if part in ("o", "down") and kind == "weight" else Whole()
