"""Recipes: how a tensor of a case is made, from data small enough to print.

A recipe and a tensor's name decide every element, in any process and on any device: the values come from a
counter-based generator (Philox 4x64, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by
the seed and the name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from reference.dtypes import Format

Values = NDArray[np.float64]

#: Kinds whose values are integers within the lattice limit, so that sums of products are exact in any order.
EXACT_KINDS = ("lattice", "zeros", "constant_per_rank")

INJECTIONS: Mapping[str, float] = {"inf": np.inf, "-inf": -np.inf, "nan": np.nan}


@dataclass(frozen=True)
class Recipe:
    """What a tensor is filled with.

    ``kind`` is one of `KINDS`. ``inject`` places one value of `INJECTIONS` at the flat position ``at`` (modulo the
    number of elements) of the global tensor. Raises ValueError for unknown names.
    """

    kind: str = "lattice"
    seed: int = 0
    inject: str | None = None
    at: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown recipe kind {self.kind!r}: expected one of {', '.join(KINDS)}")
        if self.inject is not None and self.inject not in INJECTIONS:
            raise ValueError(f"unknown injection {self.inject!r}: expected one of {', '.join(INJECTIONS)}")
        if self.seed < 0 or self.at < 0:
            raise ValueError(f"seed {self.seed} and position {self.at} must not be negative")


def fill(recipe: Recipe, name: str, shape: tuple[int, ...], fmt: Format, limit: int = 1) -> torch.Tensor:
    """The global tensor ``name``: float64, of ``shape``, every value representable in ``fmt``.

    ``limit`` is the largest magnitude of lattice values (see `reference.lattice`).
    """
    key = hashlib.blake2b(f"{recipe.seed}/{name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    values = KINDS[recipe.kind](generator, shape, fmt, limit)
    # Round to the format under test: the expected values start from what the candidate can hold.
    tensor = torch.from_numpy(np.asarray(values, order="C")).to(fmt.torch_dtype).to(torch.float64)
    if recipe.inject is not None and tensor.numel():
        tensor.view(-1)[recipe.at % tensor.numel()] = INJECTIONS[recipe.inject]
    return tensor


def _lattice(g: np.random.Generator, shape: tuple[int, ...], fmt: Format, limit: int) -> Values:
    return g.integers(-limit, limit, size=shape, endpoint=True).astype(np.float64)


def _zeros(g: np.random.Generator, shape: tuple[int, ...], fmt: Format, limit: int) -> Values:
    return np.zeros(shape)


def _constant_per_rank(g: np.random.Generator, shape: tuple[int, ...], fmt: Format, limit: int) -> Values:
    """One constant for each index of the first dimension, cycling through 1 .. limit."""
    first = shape[0] if shape else 1
    column = 1.0 + np.arange(first) % limit
    return np.broadcast_to(column.reshape((-1,) + (1,) * (len(shape) - 1)) if shape else column[0], shape).copy()


def _normal(g: np.random.Generator, shape: tuple[int, ...], fmt: Format, limit: int) -> Values:
    return g.standard_normal(shape)


def _uniform(g: np.random.Generator, shape: tuple[int, ...], fmt: Format, limit: int) -> Values:
    """In [0, 1): all of one sign, so that roundings of a sum do not cancel."""
    return g.random(shape)


def _spiky(g: np.random.Generator, shape: tuple[int, ...], fmt: Format, limit: int) -> Values:
    """Magnitudes spread over thirteen binary orders."""
    return g.standard_normal(shape) * 2.0 ** g.integers(-6, 6, size=shape, endpoint=True)


def _cancelling(g: np.random.Generator, shape: tuple[int, ...], fmt: Format, limit: int) -> Values:
    """Large values whose second half along the last dimension nearly cancels the first."""
    values = 8.0 * g.standard_normal(shape)
    half = shape[-1] // 2 if shape else 0
    if half:
        values[..., half : 2 * half] = -values[..., :half] * (1 + 2.0**-6 * g.standard_normal((*shape[:-1], half)))
    return values


def _near_overflow(g: np.random.Generator, shape: tuple[int, ...], fmt: Format, limit: int) -> Values:
    """Magnitudes between a quarter and all of the format's largest value."""
    sign = 2.0 * g.integers(0, 1, size=shape, endpoint=True) - 1
    return sign * (0.25 + 0.75 * g.random(shape)) * fmt.largest


def _subnormal(g: np.random.Generator, shape: tuple[int, ...], fmt: Format, limit: int) -> Values:
    """Whole multiples of the format's smallest subnormal value, below its smallest normal one."""
    most = 2 ** (fmt.precision - 1) - 1
    return g.integers(-most, most, size=shape, endpoint=True).astype(np.float64) * fmt.smallest


KINDS: Mapping[str, Callable[[np.random.Generator, tuple[int, ...], Format, int], Values]] = {
    "lattice": _lattice,
    "zeros": _zeros,
    "constant_per_rank": _constant_per_rank,
    "normal": _normal,
    "uniform": _uniform,
    "spiky": _spiky,
    "cancelling": _cancelling,
    "near_overflow": _near_overflow,
    "subnormal": _subnormal,
}
