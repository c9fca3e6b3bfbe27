"""How a batch is cut into micro-batches, layers are dealt to stages, and a loss is averaged over micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed import ProcessGroup

from sharded import loss_normalization
from sharded.cut import cut

T = TypeVar("T")


def cut_batch(tensors: Sequence[torch.Tensor], micro_batches: int) -> list[tuple[torch.Tensor, ...]]:
    """The batch, cut along the first dimension of every tensor into micro-batches; the first ones are one longer where
    they cannot be equal. Views.

    Raises ValueError where there are no micro-batches, more of them than samples, or tensors of different lengths.
    """
    lengths = {x.shape[0] for x in tensors}
    if len(lengths) != 1:
        raise ValueError(f"tensors of {sorted(lengths)} samples: expected one or more of the same length")
    (samples,) = lengths
    require_micro_batches(micro_batches)
    if samples < micro_batches:
        raise ValueError(
            f"a batch of {samples} samples in {micro_batches} micro-batches: expected at least one sample in each; "
            "take fewer micro-batches or a larger batch"
        )
    sizes = list(cut(samples, micro_batches))
    return list(zip(*(torch.split(x, sizes) for x in tensors), strict=True))


def require_micro_batches(micro_batches: int) -> None:
    """Raises ValueError for none."""
    if micro_batches < 1:
        raise ValueError(f"{micro_batches} micro-batches: expected at least 1")


def deal(layers: Sequence[T], stages: int, chunks: int = 1) -> list[list[T]]:
    """The layers of each of ``stages * chunks`` stages, in balance, the first ones one longer.

    Raises ValueError where there are fewer layers than stages.
    """
    total = stages * chunks
    if chunks < 1 or stages < 1 or len(layers) < total:
        raise ValueError(
            f"{len(layers)} layers on {stages} ranks with {chunks} virtual stages each: expected at least {total} "
            "layers, one for each stage; take fewer virtual stages"
        )
    lengths, dealt, at = cut(len(layers), total), [], 0
    for length in lengths:
        dealt.append(list(layers[at : at + length]))
        at += length
    return dealt


class Loss(Protocol):
    """What the last stage's output becomes."""

    def begin(self, targets: Sequence[Any]) -> None:
        """Sees the targets of all micro-batches before the first one."""

    def share(self, output: Any, target: Any) -> torch.Tensor:
        """The micro-batch's part of the loss of the batch, a scalar: the loss is the sum over micro-batches."""


class TokenLoss:
    """Averages losses of tokens over the valid ones of the whole batch, however many each micro-batch has.

    Targets are masks of the valid tokens, bool [samples, tokens], and outputs their losses, of the same shape. kind: as
    in `sharded.loss_normalization`. group: of the data-parallel ranks whose tokens count too.
    """

    def __init__(self, kind: loss_normalization.Kind = "token_mean", group: ProcessGroup | None = None) -> None:
        self._kind, self._group = kind, group
        self._divisor = torch.ones((), dtype=torch.int64)

    def begin(self, targets: Sequence[torch.Tensor]) -> None:
        """Counts the tokens. One all-reduce of one element over the group, unless it is a sum."""
        self._divisor = loss_normalization.divisor(targets, self._kind, self._group)

    def share(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_normalization.share(output, target, self._kind, self._divisor)
