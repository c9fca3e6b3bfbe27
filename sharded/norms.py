"""Layer norm and RMS norm over the last dimension, for activations whose width is not cut.

Their parameters are replicated. Under sequence parallelism a rank normalises its own tokens: the parameters are marked,
and `sequence_parallel.finish_sequence_parallel_gradients` sums their gradients (arXiv 2205.05198, section 4.2).

Everything inside is in fp32 at least and rounded once at the end, also for parameters of low precision.

Legend: T tokens (any dimensions), N the width that is normalised.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn

from sharded.main_grad import attach, widened
from sharded.parallel_linear import PartOptions
from sharded.sequence_parallel import mark

Kind: TypeAlias = Literal["layer", "rms"]
EPSILON = 1e-5


class Norm(nn.Module):
    """``weight`` [N], ones, and ``bias`` [N], zeros, None where not built. main_grad: as in ParallelLinear."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        width: int,
        *,
        bias: bool,
        sequence_parallel: bool = False,
        main_grad: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.width, self.main_grad = width, main_grad
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(width, dtype=dtype, device=device)) if bias else None
        for parameter in self.parameters():
            if sequence_parallel:
                mark(parameter)
            if main_grad:
                attach(parameter)

    def _wide(self, parameter: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        if parameter is None:
            return None
        return (widened(parameter) if self.main_grad else parameter).to(dtype)

    def extra_repr(self) -> str:
        return f"{self.width}, bias={self.bias is not None}"


class LayerNorm(Norm):
    """x [T, N] -> (x - mean) / sqrt(variance + eps) * weight + bias, [T, N]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight, bias = self._wide(self.weight, dtype), self._wide(self.bias, dtype)
        return F.layer_norm(x.to(dtype), (self.width,), weight, bias, EPSILON).to(x.dtype)


class RMSNorm(Norm):
    """x [T, N] -> x / sqrt(mean of squares + eps) * weight, [T, N] (arXiv 1910.07467)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(dtype), (self.width,), self._wide(self.weight, dtype), EPSILON).to(x.dtype)


def norm(kind: Kind, width: int, options: PartOptions, *, bias: bool = True, sequence_parallel: bool = False) -> Norm:
    """The norm of a kind with what the options say of its parameters; bias: of the layer norm, as an RMS norm has none.

    sequence_parallel: not from the options, as some norms do not work on cut tokens.
    """
    made = RMSNorm if kind == "rms" else LayerNorm
    return made(
        width,
        bias=bias and kind == "layer",
        sequence_parallel=sequence_parallel,
        main_grad=options.get("main_grad", False),
        dtype=options.get("dtype"),
        device=options.get("device"),
    )
