"""The output layer and its loss in one: from hidden states to cross entropy, with the vocabulary cut.

Legend: T tokens (any dimensions), H hidden, w this rank's rows of the output layer's weight.

| forward | backward |
|---|---|
| the three all-reduces of T of the loss | one all-reduce T x H, of the hidden states' gradient |
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch.distributed import ProcessGroup

from sharded.collectives import copy_to_group
from sharded.cross_entropy import Options, vocab_parallel_cross_entropy
from sharded.linear_function import linear
from sharded.main_grad import buffer_of
from sharded.process_groups import default_group


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    group: ProcessGroup | None = None,
    **options: Unpack[Options],
) -> torch.Tensor:
    """The loss of the logits hidden W^T: hidden [T, H] and targets [T] alike on all ranks of the group; weight [w, H].

    weight: the output layer's, or that of the embedding that it is tied to, whose gradients then add up; the gradient
    goes to ``weight.main_grad`` where there is one. group, options: see `vocab_parallel_cross_entropy`.

    The logits are in hidden's dtype, and not kept: backward is made from the probabilities. The weight's gradient needs
    no reduction, since a rank has the whole gradient of its own logits.
    Raises as `vocab_parallel_cross_entropy` does, and ValueError where hidden does not fit the weight.
    """
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden of shape {tuple(hidden.shape)} and weight of shape {tuple(weight.shape)}: expected [T, H] and "
            "[w, H]"
        )
    group = default_group() if group is None else group
    logits = linear(copy_to_group(hidden, group), weight, None, to_main_grad=buffer_of(weight) is not None)
    return vocab_parallel_cross_entropy(logits, targets, group=group, **options)
