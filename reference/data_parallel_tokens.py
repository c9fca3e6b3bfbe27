"""Which tokens of a data-parallel case count, and how much in the loss. Shapes as in `reference.data_parallel`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from reference.precision import computed_in

if TYPE_CHECKING:
    from reference.data_parallel import DataParallelCase


def valid_tokens(case: DataParallelCase, step: int) -> torch.Tensor:
    """Which tokens count: bool [M, R, n, S, L]."""
    dims = case.micro_batches, case.replicas, case.parallel_size, case.samples
    start = step * math.prod(dims)
    # Ranks are told apart by the fastest index, so that few counts differ between them.
    places = torch.arange(start, start + math.prod(dims)).view(dims[0], dims[3], dims[1], dims[2]).permute(0, 2, 3, 1)
    counts = torch.tensor(case.counts)[places % len(case.counts)]
    for coordinate in case.empty:
        counts[:, :, coordinate % case.parallel_size] = 0
    return torch.arange(case.length) < counts.unsqueeze(-1)


def divisors(case: DataParallelCase, step: int) -> list[float]:
    """Everything by which a loss is divided."""
    counts_MRnS = valid_tokens(case, step).sum(-1)
    if case.loss == "sum":
        return []
    if case.loss == "token_mean":
        return counts_MRnS.sum((0, 2, 3)).tolist()
    return [*(counts_MRnS > 0).sum((0, 2, 3)).tolist(), *set(counts_MRnS.flatten().tolist())]


def token_weights(case: DataParallelCase, step: int) -> torch.Tensor:
    """By what the loss of each token is multiplied in the loss of the batch: [M, R, n, S, L]."""
    valid = valid_tokens(case, step).to(torch.float64)
    counts = valid.sum(-1, keepdim=True)
    with computed_in(case.loss_format.name):
        if case.loss == "token_mean":
            return valid / counts.sum((0, 2, 3, 4), keepdim=True).clamp(min=1)
        if case.loss == "sample_mean":
            samples = (counts > 0).sum((0, 2, 3, 4), keepdim=True).clamp(min=1)
            return valid / counts.clamp(min=1) / samples
    return valid
