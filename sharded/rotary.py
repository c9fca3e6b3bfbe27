"""Rotary position embedding (RoFormer, arXiv 2104.09864), pairs in halves as in GPT-NeoX.

Element i of a head and element i + D/2 are a pair that turns by the angle position * base^(-2i/D). Nothing is cut: a
head is whole on its rank, and attention sees the whole sequence, so positions count from 0 on every rank.

Legend: S positions, B sequences, A heads, D the head's width.
"""

from __future__ import annotations

import torch

BASE = 10000.0


def require_even(width: int) -> None:
    """Raises ValueError for a head that has no pairs."""
    if width % 2:
        raise ValueError(f"rotary embedding on heads of width {width}: expected an even width, as it turns pairs")


def turns(positions: int, width: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the angles, each [S, D / 2], in like's dtype and on its device."""
    # In float64: in fp32 an angle of thousands of radians has lost its last digits before the cosine is taken.
    speeds = BASE ** (-torch.arange(0, width, 2, dtype=torch.float64, device=like.device) / width)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64, device=like.device), speeds)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [S, B, A, D], turned by its positions, [S, B, A, D]; in fp32 at least, rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    cos, sin = (t[:, None, None] for t in turns(x.shape[0], x.shape[-1], wide))
    first, second = wide.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
