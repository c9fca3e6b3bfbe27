"""The embedding table cut over the ranks of a group along its vocabulary (Megatron-LM, arXiv 1909.08053, section 3).

Each rank looks up the tokens of its own rows, gives zeros for all others, and the group's sum is the lookup of the
whole table: every token's row is on exactly one rank.

Legend: T tokens (any dimensions, at least one; t where the first one is cut), V rows of the table (v this rank's), H
embedding_dim.

| | forward | backward |
|---|---|---|
| plain | all-reduce T x H | none |
| sequence_parallel | reduce-scatter T x H | all-gather |
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from sharded.autograd import apply
from sharded.collectives import reduce_from_group, reduce_scatter_to_group
from sharded.cut import piece
from sharded.initialization import INITS, Init, initial
from sharded.main_grad import attach, buffer_of
from sharded.partial_gradients import mark_cut
from sharded.process_groups import default_group


class VocabParallelEmbedding(nn.Module):
    """W[ids] with the rows cut: weight [v, H].

    num_embeddings: the vocabulary; ids from 0 to it are looked up. divisible_by: the table has so many rows more that
    this divides their number; they belong to no token, start as zeros, and get no gradient.
    padding_idx: a token whose row starts as zeros and gets no gradient. group, main_grad, dtype, device, init, seed: as
    in `sharded.parallel_linear.ParallelLinear`. sequence_parallel: the output is cut along the first token dimension.

    forward: ids int64 [T], alike on all ranks of the group -> [T, H]; sequence_parallel: [t, H].

    The gradient of a row sums its tokens in their order, in fp32 at least, so that it is the same in every run.
    Raises TypeError or ValueError, before anything is sent, for an argument that it cannot work with, and in forward
    for ids out of range.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        divisible_by: int = 1,
        padding_idx: int | None = None,
        group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        main_grad: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: Init = "full",
        seed: int = 0,
    ) -> None:
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        self.group = default_group() if group is None else group
        _check(num_embeddings, embedding_dim, divisible_by, padding_idx, self.group, dtype, init)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.rows = -(-num_embeddings // divisible_by) * divisible_by
        self.sequence_parallel, self.main_grad = sequence_parallel, main_grad
        self.first_row, self.own_rows = self._own_rows()
        bound = 1 / math.sqrt(embedding_dim)
        values = initial(
            "weight", (self.rows, embedding_dim), 0, self.group, init=init, seed=seed, bound=bound, dtype=dtype
        )
        values[max(0, num_embeddings - self.first_row) :] = 0
        if self._own_padding_idx() is not None:
            values[self._own_padding_idx()] = 0
        self.weight = nn.Parameter(values.to(device or torch.get_default_device()))
        mark_cut(self.weight)
        if main_grad:
            attach(self.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self._require_ids(ids)
        rows = ids - self.first_row
        elsewhere = self._elsewhere(rows)
        x = apply(Lookup, self.weight, rows.masked_fill(elsewhere, 0), elsewhere, self._own_padding_idx())
        if self.sequence_parallel:
            return reduce_scatter_to_group(x, self.group, dim=0)
        return reduce_from_group(x, self.group)

    def _own_rows(self) -> tuple[int, int]:
        """(first, number) of the rows on this rank."""
        return piece(self.rows, self.group.size(), self.group.rank())

    def _own_padding_idx(self) -> int | None:
        """The row of ``padding_idx`` in this rank's part of the table, if it is there."""
        if self.padding_idx is None:
            return None
        own = self.padding_idx - self.first_row
        return own if 0 <= own < self.own_rows else None

    def _elsewhere(self, rows: torch.Tensor) -> torch.Tensor:
        """Which tokens are on other ranks; rows: counted from this rank's first."""
        return (rows < 0) | (rows >= self.own_rows)

    def _require_ids(self, ids: torch.Tensor) -> None:
        if ids.dtype not in (torch.int64, torch.int32) or ids.dim() < 1:
            raise TypeError(
                f"ids of dtype {ids.dtype} and shape {tuple(ids.shape)}: expected int64 or int32 and at least one "
                "dimension"
            )
        if not ids.numel():
            return
        least, most = (int(one) for one in torch.aminmax(ids))
        if least < 0 or most >= self.num_embeddings:
            wrong = least if least < 0 else most
            raise ValueError(f"token {wrong} is out of range: expected ids from 0 to {self.num_embeddings - 1}")

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, rows={self.rows}, padding_idx={self.padding_idx}, "
            f"rank={self.group.rank()} of {self.group.size()}, sequence_parallel={self.sequence_parallel}"
        )


class Lookup(torch.autograd.Function):
    """weight [v, H], rows [T], elsewhere [T] -> [T, H], zero where the token is elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, rows: torch.Tensor, elsewhere: torch.Tensor, padding_idx: int | None
    ) -> torch.Tensor:
        ctx.weight, ctx.padding_idx = weight, padding_idx
        ctx.save_for_backward(rows, elsewhere)
        if not len(weight):
            return weight.new_zeros(*rows.shape, weight.shape[1])
        return weight[rows].masked_fill(elsewhere.unsqueeze(-1), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, elsewhere = ctx.saved_tensors
        counted = ~elsewhere if ctx.padding_idx is None else ~elsewhere & (rows != ctx.padding_idx)
        buffer = buffer_of(ctx.weight)
        total = buffer if buffer is not None else _zeros_like(ctx.weight)
        # With accumulate, index_put_ adds in the order of the indices, also where it sorts them first.
        total.index_put_((rows[counted],), grad[counted].to(total.dtype), accumulate=True)
        return (None if buffer is not None else total.to(ctx.weight.dtype)), None, None, None


def _zeros_like(weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32), requires_grad=False)


def _check(
    num_embeddings: object,
    embedding_dim: object,
    divisible_by: object,
    padding_idx: int | None,
    group: object,
    dtype: torch.dtype,
    init: object,
) -> None:
    named = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim, "divisible_by": divisible_by}
    for name, value in named.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: expected an int of at least 1")
        if value < 1:
            raise ValueError(f"{name}={value}: expected an int of at least 1")
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group={group!r}: expected a process group that this rank is in, or None for the default")
    assert isinstance(num_embeddings, int)
    if num_embeddings < group.size():
        raise ValueError(
            f"num_embeddings={num_embeddings} on a group of {group.size()} ranks: expected at least one token a rank; "
            "use a smaller group"
        )
    if padding_idx is not None and not 0 <= padding_idx < num_embeddings:
        raise ValueError(f"padding_idx={padding_idx}: expected a token from 0 to {num_embeddings - 1}, or None")
    if not dtype.is_floating_point:
        raise TypeError(f"dtype={dtype}: expected a floating-point dtype")
    if init not in INITS:
        raise ValueError(f"init={init!r}: expected one of {', '.join(INITS)}")
