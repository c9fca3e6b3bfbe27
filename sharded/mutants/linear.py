"""Faults in the parallel linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from sharded import embedding, initialization, linear, parallel_linear, wire
from sharded.collectives import CopyToGroup
from sharded.cut import cut, piece
from sharded.linear import RowParallelLinear
from sharded.mutants import Mutant, Patch
from sharded.process_groups import default_group


def _default_group_in_backward() -> list[Patch]:
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return wire.all_reduced(grad, default_group()), None

    return [(CopyToGroup, "backward", staticmethod(backward))]


def _bias_before_the_reduction(share: bool) -> list[Patch]:
    """share: each rank adds its share of the bias, else all of it."""
    reduced = RowParallelLinear._reduced

    def with_bias_reduced(self: RowParallelLinear, partial: torch.Tensor) -> torch.Tensor:
        bias = None if self.skip_bias_add else self._bias_for_caller()
        if bias is not None:
            partial = partial + (bias / self.group.size() if share else bias)
        return reduced(self, partial)

    def already_there(self: RowParallelLinear, y: torch.Tensor) -> torch.Tensor:
        return y

    return [(RowParallelLinear, "_reduced", with_bias_reduced), (RowParallelLinear, "_with_bias", already_there)]


def _gather_along_the_first_dimension() -> list[Patch]:
    original = wire.gathered

    def gathered(x: torch.Tensor, group: ProcessGroup, dim: int, length: int | None = None) -> torch.Tensor:
        n, length = group.size(), wire.whole_length(x, group, dim, length)
        if n == 1 or dim % x.dim() == 0:
            return original(x, group, dim, length)
        widest = cut(length, n)[0]
        pieces = original(wire.padded(x.movedim(dim, 0), widest).movedim(0, dim), group, 0)
        shape = list(x.shape)
        shape[dim] = n * widest
        return pieces.reshape(shape).narrow(dim, 0, length).contiguous()

    return [(wire, "gathered", gathered)]


def _every_shard_from_the_same_seed() -> list[Patch]:
    def initial(
        name: str, shape: tuple[int, ...], cut_dim: int | None, group: ProcessGroup, **how: Any
    ) -> torch.Tensor:
        own = list(shape)
        if cut_dim is not None:
            copies = how.get("copies", 1)
            own[cut_dim] = piece(shape[cut_dim], group.size() // copies, group.rank() // copies)[1]
        stream = initialization.generator(how["seed"], name)
        return initialization.uniform(own, how["bound"], how["dtype"], stream)

    return [(parallel_linear, "initial", initial), (embedding, "initial", initial)]


def _input_gradient_not_reduced() -> list[Patch]:
    def copy_to_group(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        return x

    return [(linear, "copy_to_group", copy_to_group)]


MUTANTS = (
    Mutant(
        "F03",
        "linear",
        "the input gradient is reduced over the global tp group instead of the layer's group",
        "NVIDIA/Megatron-LM#7452",
        _default_group_in_backward,
    ),
    Mutant(
        "F04",
        "linear",
        "row bias added before the reduction: tp times the bias",
        "pytorch/torchtitan#4245",
        lambda: _bias_before_the_reduction(share=False),
    ),
    Mutant(
        "F05",
        "linear",
        "row bias divided by tp inside the graph: output right, bias gradient 1/tp",
        "pytorch/torchtitan#4332",
        lambda: _bias_before_the_reduction(share=True),
    ),
    Mutant(
        "F11",
        "linear",
        "gather along the last dimension done by an all-gather along the first and a view",
        "NVIDIA/TransformerEngine#530",
        _gather_along_the_first_dimension,
    ),
    Mutant(
        "F13",
        "linear",
        "the same seed for every shard's initialisation: shards identical",
        "pytorch/torchtitan#3106",
        _every_shard_from_the_same_seed,
    ),
    Mutant(
        "F14",
        "linear",
        "no all-reduce of the input gradient in the column layer",
        "meta-pytorch/spmd_types, docs",
        _input_gradient_not_reduced,
    ),
)
