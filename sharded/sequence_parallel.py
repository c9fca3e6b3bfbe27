"""Gradients of parameters that every rank holds but uses on its own tokens only (arXiv 2205.05198, section 4.2).

Under sequence parallelism the norms and the row layers' biases are replicated over the tensor-parallel group, and each
rank's backward covers the tokens of its piece. The gradient of one process is the *sum* over the group, due once after
the last backward of a step and before anything reads the gradients. An average would be wrong by the group's size,
alike on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed import ProcessGroup

from sharded.partial_gradients import sum_over_group


def mark(parameter: torch.Tensor) -> None:
    """Says that the parameter's gradient covers this rank's tokens only."""
    parameter.sequence_parallel = True  # type: ignore[attr-defined]


def is_marked(parameter: torch.Tensor) -> bool:
    """Whether `mark` was called on the parameter."""
    return bool(getattr(parameter, "sequence_parallel", False))


def finish_sequence_parallel_gradients(parameters: Iterable[torch.Tensor], group: ProcessGroup) -> None:
    """Sums the gradients (``main_grad`` where there is one, else ``.grad``) of the marked parameters over the group.

    One all-reduce for each dtype. Every rank must call it with the same parameters in the same order. Frozen
    parameters are left out; a missing gradient counts as zeros, as it may be missing on some ranks only.
    """
    sum_over_group([(parameter, group.size()) for parameter in parameters if is_marked(parameter)], group)
