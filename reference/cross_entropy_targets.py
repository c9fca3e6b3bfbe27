"""The targets of a loss: how they are chosen, and which are ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from reference.ids import Ids, fill_ids
from reference.layout import cut

if TYPE_CHECKING:
    from reference.cross_entropy import CrossEntropyCase


def targets_of(case: CrossEntropyCase, m: int) -> torch.Tensor:
    """Of a micro-batch, [R, *leading], int64."""
    shape = (case.replicas, *case.leading[m])
    borders = np.cumsum([0, *cut(case.width, case.parallel_size)[:-1]]).tolist()
    targets = fill_ids(case.targets, f"targets[{m}]", shape, case.vocabulary, borders)
    targets = targets.masked_fill(_ignored(case, m, shape), case.ignore_index)
    if case.invalid and m == 0:
        targets.view(case.replicas, -1)[:, -1] = case.out_of_range
    return targets


def ignores(case: CrossEntropyCase) -> bool:
    """Whether any target is ignored."""
    return any(bool((targets_of(case, m) == case.ignore_index).any()) for m in range(len(case.leading)))


def least_valid(case: CrossEntropyCase) -> int:
    """The fewest tokens that are not ignored, of any micro-batch of any replica."""
    valid = [(targets_of(case, m) != case.ignore_index).flatten(1).sum(1) for m in range(len(case.leading))]
    return int(torch.stack(valid).min())


def _ignored(case: CrossEntropyCase, m: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Which targets are set to ``ignore_index``."""
    if case.ignored == "some":
        return fill_ids(Ids(seed=case.targets.seed), f"ignored[{m}]", shape, 3, [0]) == 0
    which = torch.zeros(shape, dtype=torch.bool)
    if case.ignored == "all" or (case.ignored == "micro_batch" and m == len(case.leading) - 1):
        which[:] = True
    elif case.ignored == "replica":
        which[0] = True
    return which
