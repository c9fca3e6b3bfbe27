"""A pre-norm transformer layer in plain torch, and the plan that cuts it, as torch's tutorial on tensor parallelism
does: heads and ffn are cut, and the tokens of norms under sequence parallelism. Norms of heads are cut over the heads,
as in torchtitan.

Inside, tensors are the rank's own: what is under test are the styles, their layouts, and the gradients of DTensor.

Legend: S tokens, B sequences, H hidden, a query heads and g key/value heads of this rank, D features of a head.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from reference.attention import ROTARY_BASE, visible_keys
from reference.layout import Split, Whole
from reference.transformer import TransformerCase, shapes
from reference.transformer_layer import EPS

FEATURES = (
    "transformer_gqa",
    "transformer_swiglu",
    "transformer_rms_norm",
    "transformer_qk_norm",
    "transformer_rotary",
    "transformer_padding_mask",
    "transformer_selective_recompute",
    "transformer_full_recompute",
    "transformer_sequence_parallel",
)

Masks = torch.Tensor | None


class Attention(nn.Module):
    """[S, B, H] -> [S, B, H], the whole of it or, under sequence parallelism, the rank's tokens."""

    def __init__(self, case: TransformerCase) -> None:
        super().__init__()
        self.case = case
        keys = case.kv_heads * case.head_size
        self.q, self.k, self.v = _linear(case, case.hidden), _linear(case, keys), _linear(case, keys)
        self.o = _linear(case, case.hidden)
        if case.qk_norm:
            self.q_norm, self.k_norm = (new_norm(case, case.head_size, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: Masks) -> torch.Tensor:
        heads = [self._heads(name, x) for name in ("q", "k", "v")]
        mix = functools.partial(_mix, mask=mask, case=self.case)
        selective = self.case.recompute == "selective"
        mixed = checkpoint(mix, *heads, use_reentrant=False) if selective else mix(*heads)
        made: torch.Tensor = self.o(mixed)
        return made

    def _heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """[S, B, a or g, D]"""
        made: torch.Tensor = getattr(self, name)(x).unflatten(-1, (-1, self.case.head_size))
        if self.case.qk_norm and name != "v":
            made = getattr(self, f"{name}_norm")(made)
        return _turned(made) if self.case.rotary and name != "v" else made


class FeedForward(nn.Module):
    def __init__(self, case: TransformerCase) -> None:
        super().__init__()
        self.up, self.down = _linear(case, case.ffn), _linear(case, case.hidden, case.ffn)
        self.gate = _linear(case, case.ffn) if case.activation == "swiglu" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        made: torch.Tensor = self.down(inner)
        return made


class Layer(nn.Module):
    def __init__(self, case: TransformerCase) -> None:
        super().__init__()
        self.norm1, self.norm2 = new_norm(case, case.hidden), new_norm(case, case.hidden)
        self.attention, self.mlp = Attention(case), FeedForward(case)
        self.recomputed = case.recompute == "full"

    def forward(self, x: torch.Tensor, mask: Masks) -> torch.Tensor:
        made: torch.Tensor = (
            checkpoint(self._run, x, mask, use_reentrant=False) if self.recomputed else self._run(x, mask)
        )
        return made

    def _run(self, x: torch.Tensor, mask: Masks) -> torch.Tensor:
        y: torch.Tensor = x + self.attention(self.norm1(x), mask)
        z: torch.Tensor = y + self.mlp(self.norm2(y))
        return z


def parallel_layer(case: TransformerCase, mesh: DeviceMesh) -> Layer:
    """The layer of the case, cut over the mesh."""
    layer = parallelize_module(Layer(case), mesh, plan_of(case))
    assert isinstance(layer, Layer)
    return layer


def plan_of(case: TransformerCase) -> dict[str, ParallelStyle]:
    """The style of each module."""
    outside = Shard(0) if case.sequence_parallel else Replicate()
    inside = Replicate()
    plan: dict[str, ParallelStyle] = {
        # One DTensor for all that read it, so that its gradient is reduced once.
        "attention": PrepareModuleInput(input_layouts=(outside, None), desired_input_layouts=(inside, None)),
        "mlp": PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(inside,)),
    }
    gate = ("mlp.gate",) if case.activation == "swiglu" else ()
    for name in ("attention.q", "attention.k", "attention.v", "mlp.up", *gate):
        plan[name] = ColwiseParallel()
    for name in ("attention.o", "mlp.down"):
        plan[name] = RowwiseParallel(output_layouts=outside)
    if case.sequence_parallel:
        plan |= {name: SequenceParallel(sequence_dim=0, use_local_output=True) for name in ("norm1", "norm2")}
    if case.qk_norm:
        for name in ("attention.q_norm", "attention.k_norm"):
            plan[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return plan


def parameters(case: TransformerCase, layer: Layer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters by their names, and how each is cut."""
    parts = dict(layer.named_children()) | dict(layer.attention.named_children()) | dict(layer.mlp.named_children())
    found, layouts = dict[str, Any](), dict[str, Any]()
    for full in shapes(case):
        name, _, kind = full.rpartition("_")
        found[full] = getattr(parts[name], kind)
        layouts[full] = Whole()
        if name in ("q", "k", "v", "up", "gate"):
            layouts[full] = Split(0, case.axis)
        elif name in ("o", "down") and kind == "weight":
            layouts[full] = Split(1, case.axis)
    return found, layouts


def masks(case: TransformerCase) -> list[Masks]:
    """For each micro-batch, True for what is seen, [sequences or 1, 1, tokens, tokens]."""
    made: list[Masks] = []
    for m, (tokens, sequences) in enumerate(case.leading):
        if case.mask == "padding":
            made.append(visible_keys(tokens, sequences, m)[:, None, None].expand(-1, 1, tokens, -1))
        else:
            made.append(torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril() if case.mask == "causal" else None)
    return made


def _mix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Masks, case: TransformerCase) -> torch.Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=case.kv_heads < case.heads)
    return mixed.permute(2, 0, 1, 3).flatten(2)


def _turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, feature i of a head together with i + D / 2."""
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    frequency = ROTARY_BASE ** (torch.arange(half, dtype=wide) / -half)
    angle = torch.arange(x.shape[0], dtype=wide)[:, None] * frequency
    cos, sin = (f(angle).to(x.dtype)[:, None, None] for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _linear(case: TransformerCase, out_features: int, in_features: int | None = None) -> nn.Linear:
    return nn.Linear(in_features or case.hidden, out_features, bias=case.bias, dtype=case.format.torch_dtype)


def new_norm(case: TransformerCase, width: int, bias: bool = True) -> nn.Module:
    if case.norm == "rms":
        return nn.RMSNorm(width, eps=EPS, dtype=case.format.torch_dtype)
    return nn.LayerNorm(width, eps=EPS, bias=bias, dtype=case.format.torch_dtype)
