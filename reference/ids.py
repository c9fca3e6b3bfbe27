"""Token ids: how they are chosen, from data small enough to print."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from reference.text import text

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Ids:
    """``kind`` is one of `IDS`, or `TEXT`. Raises ValueError for an unknown one and a negative seed."""

    kind: str = "spread"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in (*IDS, TEXT):
            raise ValueError(f"unknown kind of ids {self.kind!r}: expected one of {', '.join((*IDS, TEXT))}")
        if self.seed < 0:
            raise ValueError(f"seed {self.seed} must not be negative")


def fill_ids(ids: Ids, name: str, shape: tuple[int, ...], vocabulary: int, borders: Sequence[int]) -> torch.Tensor:
    """int64 tokens of ``shape`` from 0 to vocabulary - 1. borders: the first row of each rank's part of the table."""
    if ids.kind == TEXT:
        return _of_text(ids, name, shape, vocabulary)
    key = hashlib.blake2b(f"{ids.seed}/{name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    starts = np.array([*sorted({start for start in borders if start < vocabulary}), vocabulary])
    values = IDS[ids.kind](generator, int(np.prod(shape, dtype=np.int64)), starts)
    return torch.from_numpy(np.asarray(values, dtype=np.int64).reshape(shape))


def _of_text(ids: Ids, name: str, shape: tuple[int, ...], vocabulary: int) -> torch.Tensor:
    """Each row is a stretch of `reference.text`; ``targets`` are the bytes after those of the other names."""
    if vocabulary < 256:
        raise ValueError(f"text with a vocabulary of {vocabulary}: expected at least 256, one token for each byte")
    data = np.frombuffer(text().data, dtype=np.uint8)
    if shape[-1] >= len(data):
        raise ValueError(f"rows of {shape[-1]} tokens: expected less than the {len(data)} bytes of the text")
    key = hashlib.blake2b(f"{ids.seed}/{TEXT}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    starts = generator.integers(0, len(data) - shape[-1], size=shape[:-1])
    places = starts[..., None] + np.arange(shape[-1]) + (name == "targets")
    return torch.from_numpy(data[places].astype(np.int64))


# Each gets the generator, how many tokens, and where each rank's part of the vocabulary starts, with its end.


def _spread(g: np.random.Generator, count: int, starts: Integers) -> Integers:
    """Over the whole vocabulary."""
    return g.integers(0, starts[-1], size=count)


def _few(g: np.random.Generator, count: int, starts: Integers) -> Integers:
    """Two tokens, over and over: most rows are absent, these are repeated."""
    return g.choice(g.integers(0, starts[-1], size=2), size=count)


def _one_shard(g: np.random.Generator, count: int, starts: Integers) -> Integers:
    """All in one rank's part of the vocabulary."""
    which = int(g.integers(0, len(starts) - 1))
    return g.integers(starts[which], starts[which + 1], size=count)


def _ends(g: np.random.Generator, count: int, starts: Integers) -> Integers:
    """The first and the last token of each part."""
    return g.choice(np.concatenate([starts[:-1], starts[1:] - 1]), size=count)


#: Real text, byte by byte. It is in no drawn case: it differs from one version of Python to another.
TEXT = "text"

IDS: Mapping[str, Callable[[np.random.Generator, int, Integers], Integers]] = {
    "spread": _spread,
    "few": _few,
    "one_shard": _one_shard,
    "ends": _ends,
}
