"""The loss of a batch whose tokens are spread unevenly over ranks and micro-batches.

The mean over tokens is not the mean of the ranks' means: the divisor is counted over the whole batch, before the first
backward, and each rank's share of the loss is its own sum divided by that. Then the sum over ranks and micro-batches is
the loss of one process. A rank without a valid token has a share of 0; so has every rank of a batch without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

Kind = Literal["token_mean", "sample_mean", "sum"]


def divisor(valid: Sequence[torch.Tensor], kind: Kind, group: ProcessGroup | None) -> torch.Tensor:
    """By what the loss of the batch is divided, an int64 scalar, alike on all ranks: its valid tokens, the samples that
    have one, or 1. valid: the masks of all of this rank's micro-batches, bool [samples, tokens].

    Raises ValueError for an unknown kind. One all-reduce of one element, unless it is a sum.
    """
    if kind == "sum":
        return torch.ones((), dtype=torch.int64)
    if kind == "token_mean":
        counted = [mask.sum() for mask in valid]
    elif kind == "sample_mean":
        counted = [mask.any(-1).sum() for mask in valid]
    else:
        raise ValueError(f"loss normalisation {kind!r}: expected 'token_mean', 'sample_mean' or 'sum'")
    return over_ranks(torch.stack(counted).sum(), group)


def over_ranks(count: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """The sum over the group, of count's shape."""
    total = count.clone()
    if group is not None and group.size() > 1:
        dist.all_reduce(total, group=group)
    return total


def share(token_losses: torch.Tensor, valid: torch.Tensor, kind: Kind, of_batch: torch.Tensor) -> torch.Tensor:
    """This micro-batch's part of the loss of the batch, a scalar. token_losses: [samples, tokens]; of_batch: as
    `divisor` counts it."""
    kept = torch.where(valid, token_losses, torch.zeros((), dtype=token_losses.dtype))
    if kind == "sample_mean":
        kept = kept / valid.sum(-1, keepdim=True).clamp(min=1)
    return kept.sum() / of_batch.clamp(min=1)
