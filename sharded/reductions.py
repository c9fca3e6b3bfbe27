"""The reductions: how two ranks' values are put together, and what is done once at the end.

A NaN stays a NaN in all of them, maximum and minimum too. A mean divides the finished sum once.
"""

from __future__ import annotations

import torch

REDUCTIONS = ("sum", "avg", "max", "min")


def accumulation_dtype(dtype: torch.dtype, reduction: str, fp32: bool) -> torch.dtype:
    """The dtype in which partial results are kept and travel: fp32 for sums of 16-bit floats where asked, else the
    tensor's own. A maximum does not round in any."""
    wide = fp32 and reduction in ("sum", "avg") and dtype.is_floating_point
    return torch.promote_types(dtype, torch.float32) if wide else dtype


def combine(into: torch.Tensor, other: torch.Tensor, reduction: str) -> None:
    """Puts another rank's values, [length], together with these, in place."""
    if reduction == "max":
        torch.maximum(into, other, out=into)
    elif reduction == "min":
        torch.minimum(into, other, out=into)
    else:
        into.add_(other)


def finish(total: torch.Tensor, result: torch.Tensor, reduction: str, count: int) -> None:
    """Writes what all ``count`` ranks' values have come to into ``result``, of the tensor's dtype: a mean is divided in
    the dtype of the accumulation, and rounded to the tensor's after that."""
    if reduction == "avg":
        total.div_(count)
    if total.data_ptr() != result.data_ptr() or total.dtype != result.dtype:
        result.copy_(total)
