"""The layers that are cut over the tensor-parallel ranks, and the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from harness.module import Sharded
from reference.cross_entropy import CrossEntropyCase
from reference.embedding import EmbeddingCase
from reference.layout import Split, Whole
from reference.linear import LinearCase
from sharded.cross_entropy import vocab_parallel_cross_entropy
from sharded.embedding import VocabParallelEmbedding
from sharded.linear import ColumnParallelLinear, RowParallelLinear
from sharded.process_groups import ProcessGroups
from sharded.sequence_parallel import finish_sequence_parallel_gradients


def column_linear(case: LinearCase, groups: ProcessGroups) -> Sharded:
    layer = ColumnParallelLinear(
        case.in_features,
        case.out_features,
        gather_output=case.gather_output,
        **_options(case, groups),
    )
    split = Split(0, case.axis)
    # One call a micro-batch: an uneven cut of the sequence cannot be told from the rank's own piece.
    lengths = iter(dims[0] for dims in case.leading)

    def forward(x: torch.Tensor) -> Any:
        length = next(lengths) if case.sequence_parallel else None
        return layer(x, _weight(case, layer), sequence_length=length)

    return _sharded(case, groups, layer, forward, weight=split, bias=split)


def row_linear(case: LinearCase, groups: ProcessGroups) -> Sharded:
    layer = RowParallelLinear(
        case.in_features,
        case.out_features,
        input_is_parallel=case.input_is_parallel,
        **_options(case, groups),
    )

    def forward(x: torch.Tensor) -> Any:
        return layer(x, _weight(case, layer))

    return _sharded(case, groups, layer, forward, weight=Split(1, case.axis), bias=Whole())


def embedding(case: EmbeddingCase, groups: ProcessGroups) -> Sharded:
    layer = VocabParallelEmbedding(
        case.vocabulary,
        case.hidden,
        divisible_by=case.rows,  # the multiple that gives the case's padding
        padding_idx=case.padding_idx,
        group=groups.group(case.axis) if case.explicit_group else None,
        sequence_parallel=case.sequence_parallel,
        main_grad=case.main_grad,
        dtype=case.format.torch_dtype,
        seed=1,
    )
    return Sharded(layer, weight=Split(0, case.axis))


def cross_entropy(case: CrossEntropyCase, groups: ProcessGroups) -> Sharded:
    return Sharded(
        functools.partial(
            vocab_parallel_cross_entropy,
            group=groups.group(case.axis) if case.explicit_group else None,
            vocabulary=case.vocabulary,
            columns=case.width,
            reduction=case.reduction,
            label_smoothing=case.label_smoothing,
            smoothing=case.smoothing,
            ignore_index=case.ignore_index,
            z_loss=case.z_loss,
        )
    )


def _options(case: LinearCase, groups: ProcessGroups) -> dict[str, Any]:
    return {
        "bias": case.bias,
        "group": groups.group(case.axis) if case.explicit_group else None,
        "sequence_parallel": case.sequence_parallel,
        "skip_bias_add": case.skip_bias_add,
        "main_grad": case.main_grad,
        "dtype": case.format.torch_dtype,
        "seed": 1,
    }


def _weight(case: LinearCase, layer: Any) -> torch.Tensor | None:
    """The layer's own weight stands in for one that another layer shares."""
    return layer.weight if case.weight_at_call else None


def _sharded(
    case: LinearCase, groups: ProcessGroups, layer: Any, forward: Callable[..., Any], **layouts: Any
) -> Sharded:
    group = groups.group(case.axis)

    def finish() -> None:
        finish_sequence_parallel_gradients(layer.parameters(), group)

    return Sharded(layer, forward=forward, finish=finish, **layouts)
