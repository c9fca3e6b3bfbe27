"""Runs what a test gives with disturbed rounding, and says how far the results went."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.oracle.rounding import Rounding, Spread, spread
from reference.dtypes import FORMATS, Format

FP32 = FORMATS["fp32"]
U = FP32.unit_roundoff
RUNS = 64

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(6, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
EVEN = torch.arange(30, dtype=torch.float64).reshape(6, 5)


def disturbed(function: Callable[..., Any], *args: Any, runs: int = RUNS, fmt: Format = FP32) -> Tensor:
    """Results of disturbed runs, [K, *shape], each on copies of the arguments."""
    made = []
    for seed in range(runs):
        copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
        with Rounding(fmt, seed):
            made.append(function(*copies))
    return torch.stack(made)


def largest(function: Callable[..., Any], *args: Any, fmt: Format = FP32) -> Tensor:
    """The largest deviation of each element over all runs, in unit roundoffs."""
    copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
    return (disturbed(function, *args, fmt=fmt) - function(*copies)).abs().amax(0) / fmt.unit_roundoff


def assert_scale(got: Tensor, scale: Tensor) -> None:
    """Deviations up to the scale, and not much below it: 64 numbers in [-1, 1] have one above 0.8."""
    assert (got <= scale * (1 + 1e-6) + 1e-9).all()
    assert (got >= 0.8 * scale).all()


def one(compute: Callable[[], Tensor], **options: Any) -> Spread:
    """The spread of a reference that has one result."""
    made = spread(lambda: {"x": compute()}, options.pop("fmt", FP32), **options)["x"]
    assert made is not None
    return made
