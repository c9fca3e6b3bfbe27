"""Faults in the transformer layer: gradients that are completed wrongly, and dropout."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed import ProcessGroup

from sharded import attention, norms, transformer
from sharded.attention import SelfAttention
from sharded.collectives import gather_from_group
from sharded.linear import ColumnParallelLinear
from sharded.linear import shared_columns as original_columns
from sharded.linear_function import linears
from sharded.main_grad import buffer_of
from sharded.mutants import Mutant, Patch
from sharded.norms import Norm
from sharded.partial_gradients import mark_partial
from sharded.random import RandomTracker
from sharded.recompute import Replayed
from sharded.sequence_parallel import finish_sequence_parallel_gradients, mark


def _norms_not_marked() -> list[Patch]:
    def no_mark(parameter: torch.Tensor) -> None:
        """Leaves the parameter out of the sum."""

    return [(norms, "mark", no_mark)]


def _norms_averaged() -> list[Patch]:
    def mark_norm(parameter: torch.Tensor) -> None:
        mark(parameter)
        parameter.averaged = True  # type: ignore[attr-defined]

    def finish_averaged(parameters: Iterable[torch.Tensor], group: ProcessGroup) -> None:
        parameters = list(parameters)
        finish_sequence_parallel_gradients(parameters, group)
        for parameter in parameters:
            gradient = parameter.grad if buffer_of(parameter) is None else buffer_of(parameter)
            if getattr(parameter, "averaged", False) and gradient is not None:
                gradient.div_(group.size())

    return [(norms, "mark", mark_norm), (transformer, "finish_sequence_parallel_gradients", finish_averaged)]


def _head_norms_summed_with_the_tokens() -> list[Patch]:
    original = SelfAttention._head_norm

    def head_norm(self: SelfAttention, *arguments: Any) -> Norm:
        made = original(self, *arguments)
        if not self.sequence_parallel:
            mark_partial(made.weight, 1)
        return made

    return [(SelfAttention, "_head_norm", head_norm)]


def _shared_heads_leave_their_input_partial() -> list[Patch]:
    def shared_columns(
        x: torch.Tensor, layers: tuple[ColumnParallelLinear, ...], *, sequence_length: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        cut = [layer for layer in layers if layer.copies == 1]
        shared = [(layer._weight(None), layer.bias) for layer in layers if layer.copies > 1]
        outputs = original_columns(x, tuple(cut), sequence_length=sequence_length)
        if not shared:
            return outputs
        if cut[0].sequence_parallel:
            x = gather_from_group(x, cut[0].group, 0, sequence_length)
        return outputs + linears(x, shared, to_main_grad=cut[0].main_grad)

    return [(attention, "shared_columns", shared_columns)]


def _stream_never_entered() -> list[Patch]:
    original = RandomTracker.stream

    def stream(self: RandomTracker, name: Any, device: Any = "cpu") -> AbstractContextManager[Any]:
        # What `with tracker.stream(...) and other:` enters.
        return original(self, name, device) and nullcontext() if name == "sharded" else original(self, name, device)

    return [(RandomTracker, "stream", stream)]


def _recomputed_with_other_numbers() -> list[Patch]:
    def enter(self: Replayed) -> None:
        self._now = self._tracker.state()

    return [(Replayed, "__enter__", enter)]


MUTANTS = (
    Mutant(
        "F07",
        "transformer",
        "norm gradients under sequence parallelism are not summed over tp",
        "EleutherAI/gpt-neox#1257",
        _norms_not_marked,
    ),
    Mutant(
        "F08",
        "transformer",
        "norm gradients under sequence parallelism are averaged instead of summed: all ranks agree on the wrong value",
        "EleutherAI/gpt-neox#1259",
        _norms_averaged,
    ),
    Mutant(
        "F09",
        "transformer",
        "the head-shared norm's gradient is summed over tp only when sequence parallelism is on",
        "NVIDIA/Megatron-LM#7452",
        _head_norms_summed_with_the_tokens,
    ),
    Mutant(
        "F10",
        "transformer",
        "key/value heads shared by ranks: parameter gradients reduced, the gradient into the block left partial",
        "bigcode-project/Megatron-LM#35",
        _shared_heads_leave_their_input_partial,
    ),
    Mutant(
        "F47",
        "transformer",
        "two context managers joined with `and`: the tensor-parallel random stream is never entered",
        "NVIDIA/Megatron-LM#1256",
        _stream_never_entered,
    ),
    Mutant(
        "F48",
        "transformer",
        "recomputation without restoring the random state: other masks in backward",
        "allenai/OLMo-core#828",
        _recomputed_with_other_numbers,
    ),
)
