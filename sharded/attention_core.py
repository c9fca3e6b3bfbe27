"""Scaled dot-product attention over the heads of one rank, with masks, dropout and grouped queries. Nothing is sent.

Scores are scaled before they are rounded to the dtype, and the softmax is taken in fp32 at least (as in Megatron-LM).

Legend: S positions, B sequences, D width of a head, a query heads and g key/value heads of this rank, r = a / g: query
head i uses key/value head i // r, whose S x r queries are one matrix.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch

from sharded.random import RandomTracker, dropout

#: Which keys a query sees: all, those up to its own position, or those that are true in [B, S].
Mask: TypeAlias = Literal["causal"] | torch.Tensor | None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, dropout_p: float, tracker: RandomTracker
) -> torch.Tensor:
    """q [S, B, a, D], k and v [S, B, g, D] -> [S, B, a * D]. Dropout of the probabilities: from the sharded stream."""
    S, B, a, D = q.shape
    g = k.shape[2]
    q_heads = q.reshape(S, B * g, a // g, D).permute(1, 2, 0, 3).reshape(B * g, -1, D)
    k_heads, v_heads = (x.reshape(S, B * g, D).transpose(0, 1) for x in (k, v))
    unused = q.new_empty(1, 1, 1)
    scores = torch.baddbmm(unused, q_heads, k_heads.transpose(1, 2), beta=0, alpha=1 / math.sqrt(D))
    scores = scores.view(B, a, S, S)
    hidden = hidden_keys(mask, S, q.device)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    weights = dropout(weights, dropout_p, tracker, "sharded")
    context = torch.bmm(weights.view(B * g, -1, S), v_heads)
    return context.view(B, a, S, D).permute(2, 0, 1, 3).reshape(S, B, a * D)


def hidden_keys(mask: Mask, positions: int, device: torch.device) -> torch.Tensor | None:
    """What is not seen, to broadcast over [B, a, S, S]."""
    if mask is None:
        return None
    if isinstance(mask, torch.Tensor):
        return ~mask[:, None, None]
    return torch.ones(positions, positions, dtype=torch.bool, device=device).triu(1)


def require_mask(mask: object, positions: int, sequences: int) -> None:
    """Raises TypeError or ValueError for what is no mask of that many positions and sequences."""
    if mask is None or (isinstance(mask, str) and mask == "causal"):
        return
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        found = f"a tensor of {mask.dtype}" if isinstance(mask, torch.Tensor) else repr(mask)
        raise TypeError(f"the mask is {found}: expected None, 'causal' or a bool tensor of the keys that are seen")
    if tuple(mask.shape) != (sequences, positions):
        raise ValueError(
            f"the mask has shape {tuple(mask.shape)}: expected {(sequences, positions)}, [sequences, whole sequence]"
        )
    if not bool(mask.any(dim=1).all()):
        # Their softmax would be 0 / 0.
        raise ValueError("the mask hides every key of a sequence: expected at least one that is seen in each")
