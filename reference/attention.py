"""Multi-head attention of one process: rotary embedding, masks, grouped queries.

Legend: R replicas, S tokens of a sequence, B sequences, A query heads, G key/value heads, D features of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch

from reference.precision import computed_in, rounded_to

#: Who sees which keys: tokens see none after their own; nobody sees the last keys of a sequence; everybody sees all.
Mask = Literal["causal", "padding", "none"]

ROTARY_BASE = 10000.0


def visible_keys(tokens: int, sequences: int, m: int) -> torch.Tensor:
    """Of micro-batch ``m`` of a case with a padding mask: bool [B, S], False for the last keys of each sequence, as
    many as hide a number that differs between sequences and micro-batches, and never all."""
    hidden_B1 = torch.tensor([[(m + b + 1) % tokens] for b in range(sequences)])
    return torch.arange(tokens) < tokens - hidden_B1


def hidden_scores(mask: Mask, tokens: int, sequences: int, m: int) -> torch.Tensor | None:
    """bool, broadcast to [B, A, S, S] of queries and keys: True where a query must not see a key; None for nowhere."""
    if mask == "causal":
        return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    if mask == "padding":
        return ~visible_keys(tokens, sequences, m)[:, None, None, :]
    return None


def rotary(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Rotary position embedding (arXiv 2104.09864) of [R, S, B, heads, D]: feature i is turned together with feature
    i + D / 2, as in GPT-NeoX.

    The angles are computed in fp32 at least: in bf16 a position times a frequency is off by whole positions.
    """
    half = x.shape[-1] // 2
    with computed_in(dtype if dtype == "fp64" else "fp32"):
        frequency = ROTARY_BASE ** (torch.arange(half, dtype=torch.float64) / -half)
        angle_SF = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency
        cos, sin = angle_SF.cos(), angle_SF.sin()
    store = rounded_to(dtype)
    cos, sin = (store(values)[:, None, None] for values in (cos, sin))
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def for_queries(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values [R, S, B, G, D] as each query head sees them, [R, S, B, A, D]: head a that of a G / A."""
    R, S, B, G, D = x.shape
    return x if heads == G else x.unsqueeze(4).expand(R, S, B, G, heads // G, D).reshape(R, S, B, heads, D)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hidden: torch.Tensor | None,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda probabilities: probabilities,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v of each head, all [R, S, B, A, D]. hidden: see `hidden_scores`. change: of the
    probabilities, [R x B x A, S, S]."""
    R, S, B, A, D = q.shape
    q, k, v = (x.permute(0, 2, 3, 1, 4).reshape(-1, S, D) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(D)
    if hidden is not None:
        scores = scores.view(R, B, A, S, S).masked_fill(hidden, -math.inf).view(-1, S, S)
    mixed = torch.bmm(change(scores.softmax(-1)), v)
    return mixed.view(R, B, A, S, D).permute(0, 3, 1, 2, 4)
