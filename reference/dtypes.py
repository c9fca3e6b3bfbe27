"""The floating-point formats under test, by name."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A floating-point format.

    ``precision`` is the number p of significand bits including the hidden one (IEEE 754-2019, section 3.3),
    ``unit_roundoff`` is 2^-p, ``largest`` the largest finite value and ``smallest`` the smallest subnormal one.
    """

    name: str
    torch_dtype: torch.dtype
    precision: int

    @functools.cached_property
    def unit_roundoff(self) -> float:
        return 2.0**-self.precision

    @functools.cached_property
    def largest(self) -> float:
        return float(torch.finfo(self.torch_dtype).max)

    @functools.cached_property
    def smallest_normal(self) -> float:
        return float(torch.finfo(self.torch_dtype).smallest_normal)

    @functools.cached_property
    def smallest(self) -> float:
        return self.smallest_normal * 2.0 ** (1 - self.precision)


FORMATS = {
    f.name: f
    for f in (
        Format("fp32", torch.float32, 24),
        Format("fp64", torch.float64, 53),
        Format("bf16", torch.bfloat16, 8),
        Format("fp16", torch.float16, 11),
    )
}


def format_of(name: str) -> Format:
    """The format of that name; ValueError names the known ones."""
    if name not in FORMATS:
        raise ValueError(f"unknown dtype {name!r}: expected one of {', '.join(FORMATS)}")
    return FORMATS[name]
