"""Dropout of a GPT by given masks: of what is embedded, and in every layer of attention's probabilities and of what is
added to the residual. Legend as in `reference.gpt`; A query heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from reference.gpt import GptCase
from reference.layout import Each, Layout, Split
from reference.transformer_dropout import dropped, mask_name
from reference.transformer_layer import Change

#: The place of the mask of what is embedded; those of layer 3 are ``layers.3.o`` and so on.
EMBEDDED = "embedded"
_OF_LAYER = ("probabilities", "o", "down")

#: What is kept, bool, by `mask_name`.
Masks = Mapping[str, torch.Tensor]


def places(case: GptCase, stage: int) -> list[str]:
    """The masks of each forward of a stage, in its order; none without dropout."""
    if not case.dropout:
        return []
    first = [EMBEDDED] if stage == 0 else []
    return first + [f"layers.{number}.{place}" for number in case.layers_on(stage) for place in _OF_LAYER]


def mask_shape(case: GptCase, place: str, m: int) -> tuple[int, ...]:
    """Global, of micro-batch ``m``: [N, D, b, A, S, S] of probabilities, else [N, D, S, b, H]."""
    ranks, b, S = (case.replicas, case.data_parallel_size), case.sizes[m], case.length
    return (*ranks, b, case.heads, S, S) if place.endswith("probabilities") else (*ranks, S, b, case.hidden)


def mask_layout(case: GptCase, place: str) -> Layout:
    """How it is cut: heads over tp, and with sequence parallelism tokens."""
    own = Each(case.replica_axes), Split(0, "dp")
    if place.endswith("probabilities"):
        return *own, Split(2, "tp")
    return (*own, Split(1, "tp")) if case.sequence_parallel else own


def dropping(case: GptCase, kept: Masks, numbers: Sequence[int]) -> Callable[[str], Change]:
    """What drops in the places that begin with a prefix, on the units of some micro-batches of one size, in the order
    of `reference.gpt_step.units`. Raises ValueError where a mask is missing."""
    if not case.dropout:
        return lambda prefix: lambda where, x: x

    def of(prefix: str) -> Change:
        def change(where: str, x: torch.Tensor) -> torch.Tensor:
            place = prefix + where
            if where not in (EMBEDDED, *_OF_LAYER):
                return x
            names = [mask_name(place, m) for m in numbers]
            missing = [name for name in names if name not in kept]
            if missing:
                raise ValueError(f"dropout {case.dropout} without {', '.join(missing)}: expected what each mask keeps")
            return dropped(x, torch.stack([kept[name] for name in names], 2), case.dropout)

        return change

    return of
