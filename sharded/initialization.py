"""Random initial parameters whose shards fit together.

``full``: the whole tensor is drawn from the seed on every rank and cut, so the shards joined are the tensor that one
process draws, bit by bit, whatever the group's size. Costs the whole tensor's memory for a moment.
``per_rank``: each rank draws its shard alone, from the seed and its rank in the group; shards differ, and so do the
values for another group size. Parameters that are not cut are equal on all ranks either way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch.distributed import ProcessGroup

from sharded.cut import piece

Init: TypeAlias = Literal["full", "per_rank"]
INITS: tuple[Init, ...] = ("full", "per_rank")


def derived_seed(seed: int, *key: object) -> int:
    """A seed of its own for every seed and key, the same in every process.

    Neighbouring seeds and keys are hashed apart: adding a rank to a seed would give rank 1 of seed 0 the numbers of
    rank 0 of seed 1.
    """
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def generator(seed: int, *key: object) -> torch.Generator:
    """The random stream of `derived_seed`."""
    return torch.Generator().manual_seed(derived_seed(seed, *key))


def uniform(shape: Sequence[int], bound: float, dtype: torch.dtype, stream: torch.Generator) -> torch.Tensor:
    """Uniform in [-bound, bound]. Drawn in fp32 (fp64 for fp64), so that bf16 is the same seed's fp32, rounded."""
    drawn = torch.empty(shape, dtype=torch.promote_types(dtype, torch.float32), device="cpu")
    return drawn.uniform_(-bound, bound, generator=stream).to(dtype)


def initial(
    name: str,
    shape: Sequence[int],
    cut_dim: int | None,
    group: ProcessGroup,
    *,
    init: Init,
    seed: int,
    bound: float,
    dtype: torch.dtype,
    copies: int = 1,
) -> torch.Tensor:
    """This rank's part of a parameter of whole ``shape``, cut along ``cut_dim``; all of it where that is None.

    copies: so many neighbouring ranks hold the same part.
    """
    if cut_dim is None:
        return uniform(shape, bound, dtype, generator(seed, name))
    index = group.rank() // copies
    offset, length = piece(shape[cut_dim], group.size() // copies, index)
    if init == "full":
        whole = uniform(shape, bound, dtype, generator(seed, name))
        return whole.narrow(cut_dim, offset, length).clone(memory_format=torch.contiguous_format)
    own_shape = [length if dim == cut_dim else n for dim, n in enumerate(shape)]
    return uniform(own_shape, bound, dtype, generator(seed, name, index))
