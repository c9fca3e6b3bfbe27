"""Self-attention with the heads cut over a group (Megatron-LM, arXiv 1909.08053, section 3).

Heads are independent, so each rank computes its own: one all-reduce forward and one backward, or under sequence
parallelism a gather and a reduce-scatter; queries, keys and values share one gather. With grouped queries (arXiv
2305.13245) each key/value head serves heads / kv_heads neighbouring query heads. Where there are fewer key/value heads
than ranks, neighbouring ranks hold the same one, each for its own query heads: their parameter gradients are summed
after backward (partial_gradients.py), and their input gradients join those of the other columns.

Legend: S positions (s where sequence parallelism cuts them), B sequences, H hidden, D width of a head, A query heads
and G key/value heads (a, g this rank's).
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import nn

from sharded.attention_core import Mask, attention, require_mask
from sharded.initialization import derived_seed
from sharded.linear import ColumnParallelLinear, RowParallelLinear, shared_columns
from sharded.norms import Kind, Norm, norm
from sharded.parallel_linear import BlockOptions
from sharded.partial_gradients import mark_partial
from sharded.process_groups import default_group
from sharded.random import RandomTracker, require_probability
from sharded.recompute import checkpoint
from sharded.rotary import require_even, rotated


class SelfAttention(nn.Module):
    """Parameters: of q [a * D, H], k and v [g * D, H], o [H, a * D]; q_norm and k_norm [D], None where not built.

    kv_heads: G, by default A. qk_norm: the kind of norm over each head of q and k, before their rotary embedding, with
    weights that all heads share and no bias; None for none. dropout: of the attention probabilities, in training.
    recompute: keep q, k and v only, and compute what is between them and the output again in backward (arXiv
    2205.05198, section 5). tracker: of the group. Options: see ParallelLinear.

    forward: x [S, B, H] -> [S, B, H]; sequence_parallel: [s, B, H] -> [s, B, H].

    Raises ValueError, before anything is sent, for sizes that the group or each other do not divide.
    """

    q_norm: Norm | None
    k_norm: Norm | None

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        tracker: RandomTracker,
        kv_heads: int | None = None,
        qk_norm: Kind | None = None,
        rotary: bool = False,
        dropout: float = 0.0,
        recompute: bool = False,
        seed: int = 0,
        **options: Unpack[BlockOptions],
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        self.group = options.get("group") or default_group()
        _check(hidden, heads, kv_heads, self.group.size())
        require_probability("attention_dropout", dropout)
        self.width = hidden // heads
        if rotary:
            require_even(self.width)
        self.rotary, self.dropout, self.recompute, self.tracker = rotary, dropout, recompute, tracker
        self.sequence_parallel = options.get("sequence_parallel", False)
        copies = max(1, self.group.size() // kv_heads)

        def column(name: str, heads: int, copies: int = 1) -> ColumnParallelLinear:
            features = heads * self.width
            return ColumnParallelLinear(hidden, features, copies=copies, seed=derived_seed(seed, name), **options)

        self.q = column("q", heads)
        self.k, self.v = column("k", kv_heads, copies), column("v", kv_heads, copies)
        self.o = RowParallelLinear(heads * self.width, hidden, seed=derived_seed(seed, "o"), **options)
        self.q_norm = self._head_norm(qk_norm, options) if qk_norm else None
        self.k_norm = self._head_norm(qk_norm, options) if qk_norm else None

    def forward(self, x: torch.Tensor, *, mask: Mask = None, sequence_length: int | None = None) -> torch.Tensor:
        """mask: see attention_core. sequence_length: as in ColumnParallelLinear."""
        cut = self.group.size() if self.sequence_parallel else 1
        require_mask(mask, x.shape[0] * cut if sequence_length is None else sequence_length, x.shape[1])
        columns = shared_columns(x, (self.q, self.k, self.v), sequence_length=sequence_length)
        q, k, v = (y.view(*y.shape[:-1], -1, self.width) for y in columns)
        q, k = self._positioned(q, self.q_norm), self._positioned(k, self.k_norm)
        y: torch.Tensor = self.o(self._core(q, k, v, mask))
        return y

    def _core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
        """[S, B, a, D], [S, B, g, D], [S, B, g, D] -> [S, B, a * D]"""
        p = self.dropout if self.training else 0.0

        def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attention(q, k, v, mask, p, self.tracker)

        return checkpoint(core, q, k, v, tracker=self.tracker) if self.recompute else core(q, k, v)

    def _positioned(self, x: torch.Tensor, head_norm: Norm | None) -> torch.Tensor:
        """Heads [S, B, ., D] as they meet in the scores."""
        if head_norm is not None:
            x = head_norm(x)
        return rotated(x) if self.rotary else x

    def _head_norm(self, kind: Kind, options: BlockOptions) -> Norm:
        made = norm(kind, self.width, options, bias=False)
        # Each rank normalises its own heads, whether or not the tokens are cut as well.
        mark_partial(made.weight, self.group.size())
        return made


def _check(hidden: int, heads: int, kv_heads: int, ranks: int) -> None:
    for name, value in (("hidden", hidden), ("heads", heads), ("kv_heads", kv_heads)):
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1")
    if hidden % heads:
        raise ValueError(f"hidden={hidden} with heads={heads}: expected a hidden size that the heads divide")
    if heads % ranks:
        raise ValueError(
            f"heads={heads} over {ranks} ranks: expected heads that their number divides; use a smaller group"
        )
    if heads % kv_heads:
        raise ValueError(f"heads={heads} with kv_heads={kv_heads}: expected heads that the key/value heads divide")
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(
            f"kv_heads={kv_heads} over {ranks} ranks: expected a multiple of their number, or a number that divides it "
            "so that the same number of ranks share each"
        )
