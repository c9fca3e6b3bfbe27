"""What column- and row-parallel linear layers have in common: options, parameters, checks."""

from __future__ import annotations

import math
from typing import TypedDict

import torch
from torch import nn
from torch.distributed import ProcessGroup

from sharded.cut import piece
from sharded.initialization import INITS, Init, initial
from sharded.main_grad import attach, require, returned
from sharded.partial_gradients import mark_cut
from sharded.process_groups import default_group

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]


class PartOptions(TypedDict, total=False):
    """The keywords that every part of a model takes; meaning and defaults are ParallelLinear's."""

    group: ProcessGroup | None
    sequence_parallel: bool
    main_grad: bool
    dtype: torch.dtype | None
    device: torch.device | str | None
    init: Init


class BlockOptions(PartOptions, total=False):
    """The keywords that a block hands to each of its linear layers."""

    bias: bool


class Options(BlockOptions, total=False):
    """The keywords that both layers take."""

    skip_bias_add: bool
    seed: int
    build_weight: bool


class ParallelLinear(nn.Module):
    """Parameters ``weight`` [o, i] and ``bias`` [o], this rank's piece of [O, I] and [O]; None where not built.

    cut_weight_dim, cut_bias_dim: the dimension that is cut over the group; None where it is replicated.
    bias: whether there is one.
    group: the ranks that share the layer; by default the default mesh's tp group.
    sequence_parallel: the tokens outside the layer are cut along their first dimension.
    skip_bias_add: forward returns (output, bias) and leaves the addition to the caller.
    main_grad: gradients accumulate in fp32 (fp64 for fp64) in ``parameter.main_grad``, and ``.grad`` stays None.
    dtype, device: of the parameters; by default torch's.
    init, seed: see initialization.py; weight and bias are uniform in +-1/sqrt(in_features), as in torch.nn.Linear.
    build_weight: False where every forward is given the weight, which belongs to another layer.
    copies: so many neighbouring ranks hold the same piece; it divides the group's size.

    Raises TypeError or ValueError, before anything is sent, for an argument that it cannot work with.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        cut_weight_dim: int,
        cut_bias_dim: int | None,
        *,
        bias: bool = True,
        group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        main_grad: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: Init = "full",
        seed: int = 0,
        build_weight: bool = True,
        copies: int = 1,
    ) -> None:
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        _check(in_features, out_features, group, dtype, init, seed)
        self.in_features, self.out_features = in_features, out_features
        self.group = default_group() if group is None else group
        _check_copies(copies, self.group)
        self.copies = copies
        self.sequence_parallel, self.skip_bias_add, self.main_grad = sequence_parallel, skip_bias_add, main_grad

        def parameter(name: str, shape: tuple[int, ...], cut_dim: int | None) -> nn.Parameter:
            bound = 1 / math.sqrt(in_features)
            values = initial(
                name, shape, cut_dim, self.group, init=init, seed=seed, bound=bound, dtype=dtype, copies=copies
            )
            made = nn.Parameter(values.to(device or torch.get_default_device()))
            if cut_dim is not None:
                mark_cut(made)
            if main_grad:
                attach(made)
            return made

        shape = (out_features, in_features)
        self._weight_shape = tuple(self._own(n) if dim == cut_weight_dim else n for dim, n in enumerate(shape))
        self.weight = parameter("weight", shape, cut_weight_dim) if build_weight else None
        self.bias = parameter("bias", (out_features,), cut_bias_dim) if bias else None

    def _own(self, features: int) -> int:
        return piece(features, self.group.size() // self.copies, self.group.rank() // self.copies)[1]

    def _weight(self, given: torch.Tensor | None) -> torch.Tensor:
        """The weight to multiply with, checked."""
        weight = self.weight if given is None else given
        if weight is None:
            raise ValueError("the layer was built with build_weight=False: pass forward(x, weight)")
        if tuple(weight.shape) != self._weight_shape:
            raise ValueError(
                f"the weight given has shape {tuple(weight.shape)}: expected {self._weight_shape}, this rank's piece "
                f"of ({self.out_features}, {self.in_features})"
            )
        if self.main_grad and weight.requires_grad:
            require(weight)
        return weight

    def _require_input(self, x: torch.Tensor, features: int) -> None:
        if x.dim() < 1 or x.shape[-1] != features:
            raise ValueError(f"the input has shape {tuple(x.shape)}: expected [..., {features}] on this rank")
        if self.sequence_parallel and x.dim() < 2:
            raise ValueError(
                f"the input has shape {tuple(x.shape)}: sequence_parallel cuts the first dimension, expected at least "
                "[tokens, features]"
            )

    def _bias_for_caller(self) -> torch.Tensor | None:
        return returned(self.bias) if self.bias is not None and self.main_grad else self.bias

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank={self.group.rank()} of {self.group.size()}, sequence_parallel={self.sequence_parallel}"
        )


def _check(
    in_features: object, out_features: object, group: object, dtype: torch.dtype, init: object, seed: object
) -> None:
    for name, value in (("in_features", in_features), ("out_features", out_features)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: expected an int of at least 1")
        if value < 1:
            raise ValueError(f"{name}={value}: expected an int of at least 1")
    if group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(f"group={group!r}: expected a process group that this rank is in, or None for the default")
    if not dtype.is_floating_point:
        raise TypeError(f"dtype={dtype}: expected a floating-point dtype")
    if init not in INITS:
        raise ValueError(f"init={init!r}: expected one of {', '.join(INITS)}")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed={seed!r}: expected an int")


def _check_copies(copies: int, group: ProcessGroup) -> None:
    if copies < 1 or group.size() % copies:
        raise ValueError(f"copies={copies} on a group of {group.size()} ranks: expected a number that divides it")
