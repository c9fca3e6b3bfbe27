"""The forward of a pre-norm transformer layer in one process (Megatron-LM, arXiv 1909.08053, section 3).

Legend: R replicas, S tokens of a sequence, B sequences, H hidden, A heads, D features of a head, F ffn. Matrices are
[R, out, in], as every replica has gradients of its own. Vectors have dimensions for what they are broadcast over:
[R, 1, 1, width] for tokens, norms of heads [R, 1, 1, 1, D]. Whoever passes one for each token or head gets the gradient
of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

from reference.attention import attention, for_queries, hidden_scores, rotary

if TYPE_CHECKING:
    from reference.transformer import TransformerCase

EPS = 1e-5

Parameters = Mapping[str, torch.Tensor]
#: Changes a value on its way, by where it is: "queries", "keys" and "values" of each query head, [R, S, B, A, D];
#: "heads", what they give, likewise; "inner", [R, S, B, F], what the mlp's activation gives; "probabilities",
#: [R x B x A, S, S], of keys; "o" and "down", what is added to the residual, [R, S, B, H]. For dropout and mistakes.
Change = Callable[[str, torch.Tensor], torch.Tensor]


def unchanged(where: str, x: torch.Tensor) -> torch.Tensor:
    return x


def attend(case: TransformerCase, p: Parameters, x: torch.Tensor, m: int, change: Change = unchanged) -> torch.Tensor:
    """The first half of the layer on micro-batch ``m``, [R, S, B, H] -> [R, S, B, H]."""
    R, S, B, _ = x.shape
    h = norm(case, p, "norm1", x)

    def heads(name: str, count: int) -> torch.Tensor:
        made = linear(p, name, h).view(R, S, B, count, case.head_size)
        if case.qk_norm and name != "v":
            made = norm(case, p, f"{name}_norm", made)
        return rotary(made, case.dtype) if case.rotary and name != "v" else made

    q = change("queries", heads("q", case.heads))
    k, v = (for_queries(heads(name, case.kv_heads), case.heads) for name in ("k", "v"))
    k, v = change("keys", k), change("values", v)
    scores = hidden_scores(case.mask, S, B, m)
    mixed = change("heads", attention(q, k, v, scores, partial(change, "probabilities")))
    return x + change("o", linear(p, "o", mixed.reshape(R, S, B, case.hidden)))


def feed(case: TransformerCase, p: Parameters, y: torch.Tensor, change: Change = unchanged) -> torch.Tensor:
    """The second half of the layer, the mlp."""
    h = norm(case, p, "norm2", y)
    up = linear(p, "up", h)
    inner = F.silu(linear(p, "gate", h)) * up if case.activation == "swiglu" else F.gelu(up)
    return y + change("down", linear(p, "down", change("inner", inner)))


def norm(case: TransformerCase, p: Parameters, name: str, x: torch.Tensor) -> torch.Tensor:
    """Layer norm (arXiv 1607.06450) or RMS norm (arXiv 1910.07467) over the last dimension."""
    if case.norm == "layer":
        x = F.layer_norm(x, x.shape[-1:], eps=EPS)
    else:
        x = x * ((x * x).mean(-1, keepdim=True) + EPS).rsqrt()
    x = x * p[f"{name}_weight"]
    bias = p.get(f"{name}_bias")
    return x if bias is None else x + bias


def linear(p: Parameters, name: str, x: torch.Tensor) -> torch.Tensor:
    """[R, S, B, in] -> [R, S, B, out]"""
    weight, bias = p[f"{name}_weight"], p.get(f"{name}_bias")
    y = torch.bmm(x.flatten(1, 2), weight.transpose(1, 2)).view(*x.shape[:3], weight.shape[1])
    return y if bias is None else y + bias
