"""A transformer block with tied embedding and cross entropy: as a user writes its reference, and as ranks compute it.

The candidate runs in the dtype under test and in one process: every sum over tensor-parallel ranks is cut into tp parts
and put together in some order. Sizes: B sequences of S tokens, H hidden, V words.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from reference.dtypes import FORMATS
from reference.precision import computed_in, gradient_rounded_to, rounded_to
from reference.recipe import Recipe, fill

#: Output, input gradient and the gradient of the projection have 1,024 elements each.
B, S, H, V, HEADS, INNER = 2, 16, 32, 48, 4, 128

#: What a token must not see.
FUTURE = torch.ones(S, S, dtype=torch.bool).triu(1)

#: fp16 needs one: its gradients would leave the normal range. A power of two, so that it rounds nothing.
LOSS_SCALE = {"fp16": 1024.0}

#: The tied embedding is both ends.
SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (V, H),
    "norm1.weight": (H,),
    "norm1.bias": (H,),
    "qkv.weight": (3 * H, H),
    "qkv.bias": (3 * H,),
    "projection.weight": (H, H),
    "projection.bias": (H,),
    "norm2.weight": (H,),
    "norm2.bias": (H,),
    "up.weight": (INNER, H),
    "up.bias": (INNER,),
    "down.weight": (H, INNER),
    "down.bias": (H,),
    "norm3.weight": (H,),
    "norm3.bias": (H,),
}

Tensors = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Given:
    """Parameters, float64 and representable in the dtype; tokens and targets, [B, S]."""

    dtype: str
    parameters: Tensors
    tokens: Tensor
    targets: Tensor

    @property
    def loss_scale(self) -> float:
        return LOSS_SCALE.get(self.dtype, 1.0)


def given(dtype: str, seed: int) -> Given:
    """Weights of the usual size, normal over the root of the fan-in; nothing is zero or one, biases included."""
    parameters = {}
    for name, shape in SHAPES.items():
        values = fill(Recipe("normal", seed), name, shape, FORMATS["fp64"]) / math.sqrt(shape[-1])
        values = values + 1 if name.startswith("norm") and name.endswith("weight") else values
        parameters[name] = values.to(FORMATS[dtype].torch_dtype).to(torch.float64)
    rng = np.random.default_rng(seed)
    tokens, targets = (torch.from_numpy(rng.integers(0, V, (B, S))) for _ in range(2))
    return Given(dtype, parameters, tokens, targets)


#: Calls a function of tensors: what happens inside it is what one kernel of the candidate does.
Kernel = Callable[..., Tensor]


def plainly(function: Kernel, *tensors: Tensor) -> Tensor:
    """Says nothing of precision: every operation counts as rounded to the dtype under test."""
    return function(*tensors)


def in_fp32(dtype: str) -> Kernel:
    """Says what torch's kernels do in fp16 and bf16: compute in fp32, round the result; so in backward too."""

    def kernel(function: Kernel, *tensors: Tensor) -> Tensor:
        given = [gradient_rounded_to(dtype)(t) if t.requires_grad else t for t in tensors]
        with computed_in("fp32"):
            made = function(*given)
        return rounded_to(dtype)(made)

    return kernel


def reference(of: Given, kernel: Kernel = plainly) -> Tensors:
    """Every result of the block by name, in float64: its output, the loss, and all gradients.

    kernel: how the operations are called that the candidate runs as one kernel.
    """
    p = {name: value.clone().requires_grad_() for name, value in of.parameters.items()}
    x = F.embedding(of.tokens, p["embedding"])
    x.retain_grad()
    normal = kernel(layer_norm, x, p["norm1.weight"], p["norm1.bias"])
    qkv = kernel(F.linear, normal, p["qkv.weight"]) + p["qkv.bias"]
    q, k, v = qkv.view(B, S, 3, HEADS, H // HEADS).permute(2, 0, 3, 1, 4)
    scores = kernel(torch.matmul, q, k.transpose(-1, -2))
    mixed = kernel(torch.matmul, kernel(attention, scores), v).transpose(1, 2).reshape(B, S, H)
    y = x + (kernel(F.linear, mixed, p["projection.weight"]) + p["projection.bias"])
    normal = kernel(layer_norm, y, p["norm2.weight"], p["norm2.bias"])
    inner = kernel(F.gelu, kernel(F.linear, normal, p["up.weight"]) + p["up.bias"])
    output = y + (kernel(F.linear, inner, p["down.weight"]) + p["down.bias"])
    logits = kernel(F.linear, kernel(layer_norm, output, p["norm3.weight"], p["norm3.bias"]), p["embedding"])
    log_probabilities = kernel(log_softmax, logits.view(-1, V))
    loss = kernel(F.nll_loss, log_probabilities, of.targets.view(-1))
    (loss * of.loss_scale).backward()
    return _results(x, output, loss, p)


def log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (H,), weight, bias)


def attention(scores: Tensor) -> Tensor:
    """Causal; [B, heads, S, S]."""
    return (scores / math.sqrt(H // HEADS)).masked_fill(FUTURE, -math.inf).softmax(-1)


def _results(x: Tensor, output: Tensor, loss: Tensor, parameters: Tensors) -> Tensors:
    leaves = {"input": x, **parameters}
    return {"output": output, "loss": loss, **{f"{name}.grad": leaf.grad for name, leaf in leaves.items()}}


@dataclass(frozen=True, eq=False)
class Ranks:
    """Sums over tp ranks, each in an order of its own. dropped: where the sum lacks one rank's part. biased: every rank
    adds the bias of a row-parallel layer."""

    tp: int
    rng: np.random.Generator
    dropped: str | None = None
    biased: bool = False

    def summed(self, parts: list[Tensor], where: str) -> Tensor:
        parts = [parts[i] for i in self.rng.permutation(self.tp)]
        if where == self.dropped:
            parts = parts[1:]
        while len(parts) > 1:
            parts = [parts[0] + parts[1], *parts[2:]]
        return parts[0]

    def copied(self, x: Tensor, where: str) -> tuple[Tensor, ...]:
        """One for each rank; their gradients are summed."""
        copies: tuple[Tensor, ...] = _Copies.apply(x, self.tp, lambda grads: self.summed(grads, where))
        return copies

    def row(self, parts: list[Tensor], weight: Tensor, bias: Tensor, where: str) -> Tensor:
        """The row-parallel layer: each rank has columns of the weight."""
        made = [F.linear(part, w) for part, w in zip(parts, weight.chunk(self.tp, 1), strict=True)]
        if self.biased:
            return self.summed([part + bias for part in made], where)
        return self.summed(made, where) + bias


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int, summed: Callable[[list[Tensor]], Tensor]) -> tuple[Tensor, ...]:
        ctx.summed = summed
        return tuple(x.clone() for _ in range(n))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.summed(list(grads)), None, None


def candidate(of: Given, ranks: Ranks, loss_factor: float = 1.0) -> Tensors:
    """What `reference` computes, in the dtype, by ``ranks``; all results as float64."""
    dtype, tp = FORMATS[of.dtype].torch_dtype, ranks.tp
    p = {name: value.to(dtype, copy=True).requires_grad_() for name, value in of.parameters.items()}
    x = F.embedding(of.tokens, p["embedding"])
    x.retain_grad()
    normal = F.layer_norm(x, (H,), p["norm1.weight"], p["norm1.bias"])
    weights, biases = p["qkv.weight"].view(3, H, H).chunk(tp, 1), p["qkv.bias"].view(3, H).chunk(tp, 1)
    heads = [
        _attention(copy, w.reshape(-1, H), b.reshape(-1))
        for copy, w, b in zip(ranks.copied(normal, "qkv"), weights, biases, strict=True)
    ]
    y = x + ranks.row(heads, p["projection.weight"], p["projection.bias"], "projection")
    normal = F.layer_norm(y, (H,), p["norm2.weight"], p["norm2.bias"])
    inner = [
        F.gelu(F.linear(copy, w, b))
        for copy, w, b in zip(ranks.copied(normal, "up"), p["up.weight"].chunk(tp), p["up.bias"].chunk(tp), strict=True)
    ]
    output = y + ranks.row(inner, p["down.weight"], p["down.bias"], "down")
    normal = F.layer_norm(output, (H,), p["norm3.weight"], p["norm3.bias"])
    words = zip(ranks.copied(normal, "logits"), p["embedding"].chunk(tp), strict=True)
    logits = torch.cat([F.linear(copy, rows) for copy, rows in words], -1)
    loss = F.cross_entropy(logits.view(-1, V), of.targets.view(-1)) * loss_factor
    (loss * of.loss_scale).backward()
    return {name: value.detach().to(torch.float64) for name, value in _results(x, output, loss, p).items()}


def _attention(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Of some heads, whose queries, keys and values are rows of the weight: [B, S, width]."""
    width = len(bias) // 3
    q, k, v = F.linear(x, weight, bias).view(B, S, 3, width * HEADS // H, H // HEADS).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, width)
