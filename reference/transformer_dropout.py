"""Dropout of a transformer layer by given masks. Legend as in `reference/transformer_layer.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from reference.transformer_layer import Change

if TYPE_CHECKING:
    from reference.transformer import TransformerCase


def mask_name(place: str, m: int) -> str:
    return f"kept[{m}].{place}"


def mask_names(case: TransformerCase) -> list[str]:
    """Of every mask of the case; none without dropout."""
    numbers = range(len(case.leading) if case.dropout else 0)
    return [mask_name(place, m) for m in numbers for place in mask_shapes(case, m)]


def mask_shapes(case: TransformerCase, m: int) -> dict[str, tuple[int, ...]]:
    """The global shape of each dropout mask of micro-batch ``m`` by its place, in the order of forward: attention's
    probabilities, and what is added to the residual after attention and after the mlp."""
    S, B = case.leading[m]
    added = (case.replicas, S, B, case.hidden)
    return {"probabilities": (case.replicas, B, case.heads, S, S), "o": added, "down": added}


def dropping(case: TransformerCase, given: Mapping[str, torch.Tensor], m: int) -> Change:
    """Dropout by the masks in ``given``, bool, True where something is kept: that is scaled by 1 / (1 - p), a factor
    that may be rounded once for all elements. Changes nothing where there is no dropout."""

    def change(where: str, x: torch.Tensor) -> torch.Tensor:
        kept = given.get(mask_name(where, m)) if case.dropout else None
        return x if kept is None else dropped(x, kept, case.dropout)

    return change


def dropped(x: torch.Tensor, kept: torch.Tensor, p: float) -> torch.Tensor:
    """x where it is kept, divided by 1 - p, else 0. kept: bool, of as many elements."""
    scale = torch.ones((), dtype=x.dtype) / (1 - p)
    return (x * scale).masked_fill(~kept.reshape(x.shape), 0)
