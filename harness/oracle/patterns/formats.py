"""Formats of numbers as the patterns need them: units in the last place, rounding, and the grid that data lies on."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from reference.dtypes import FORMATS, Format

Values = NDArray[np.float64]


def format_named(dtype: str) -> Format:
    """The format of torch's dtype name; float64, which holds every other, for one that is not under test."""
    for fmt in FORMATS.values():
        if str(fmt.torch_dtype) == f"torch.{dtype}":
            return fmt
    return FORMATS["fp64"]


def rounded(values: Values, fmt: Format) -> Values:
    """The values as the format holds them, of the same shape."""
    held = torch.from_numpy(np.array(values, order="C")).to(fmt.torch_dtype)
    return np.asarray(held.to(torch.float64).numpy())


def ulp(values: Values, fmt: Format) -> Values:
    """The distance between neighbours in the format at each value, of the same shape; at infinity and NaN, of the
    largest finite one."""
    size = np.clip(np.nan_to_num(np.abs(values), nan=fmt.largest), fmt.smallest_normal, fmt.largest)
    return np.asarray(np.ldexp(1.0, np.frexp(size)[1] - fmt.precision), dtype=np.float64)


def grid(values: Values) -> float:
    """The largest power of two of which every finite value is a whole multiple; 1 where all of them are zero."""
    numbers = values[np.isfinite(values) & (values != 0)]
    if not numbers.size:
        return 1.0
    fraction, exponent = np.frexp(numbers)
    whole = np.ldexp(fraction, 53).astype(np.int64)
    lowest = exponent - 53 + np.log2((whole & -whole).astype(np.float64)).astype(np.int64)
    return float(np.ldexp(1.0, int(lowest.min())))
