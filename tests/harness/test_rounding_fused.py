"""Fused operations are taken apart: they compute the same, and err no less."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from roundings import FP32, U, X, Y
from torch import Tensor

from harness.oracle.rounding import spread
from reference.dtypes import Format

FUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "softmax of the first": lambda x: x.softmax(0),
    "softmax of a number": lambda x: x[0, 0].softmax(0).reshape(1),
    "log_softmax": lambda x: x.log_softmax(0),
    "logsumexp": lambda x: x.logsumexp([0, 1]),
    "layer_norm": lambda x: F.layer_norm(x, (6, 5)),
    "group_norm": lambda x: F.group_norm(x[None], 3),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(5).double(), torch.ones(5).double(), training=True),
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "celu": lambda x: F.celu(x, 0.7),
    "selu": F.selu,
    "glu": lambda x: F.glu(x, 0),
    "softplus": lambda x: F.softplus(x, 2.0, 1.0),
    "std": lambda x: x.std(0, keepdim=True),
    "var": lambda x: x.var(correction=0),
    "std_mean": lambda x: torch.cat(torch.std_mean(x, 1)),
    "dropout": lambda x: F.dropout(x, 0.4),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(6) % 5, ignore_index=2, label_smoothing=0.1),
    "mse": lambda x: F.mse_loss(x, Y),
    "huber": lambda x: F.huber_loss(x, Y, delta=0.7),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, Y, reduction="sum"),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, Y.sigmoid()),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], Y[None], x[None], is_causal=True),
    "attention to nothing": lambda x: F.scaled_dot_product_attention(
        x[None], Y[None], x[None], torch.ones(6, 6).tril(-1).bool()
    ),
    "logaddexp": lambda x: torch.logaddexp(x, Y),
    "lerp": lambda x: torch.lerp(x, Y, 0.3),
    "logit": lambda x: torch.logit(x.sigmoid()),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("engine", ["separate", "together"])
def test_what_is_taken_apart_computes_the_same_and_errs_no_less(name: str, engine: str) -> None:
    """Results and gradients: within 1e-12 of torch's kernel in float64, and in fp32 disturbed as fits the format."""

    def compute() -> dict[str, Tensor]:
        x = X.clone().requires_grad_()
        y = FUSED[name](x)
        torch.autograd.backward(y, torch.linspace(0.5, 1.5, y.numel()).double().reshape(y.shape))
        if engine == "separate":
            float((x.detach() * 3).sum())
        assert x.grad is not None
        return {"y": y.detach(), "grad": x.grad}

    quiet = Format("exact", torch.float64, 53)
    for s in spread(compute, quiet, seed=1).values():
        assert s is not None
        assert (s.deviation <= 1e-12 * s.want.abs().max().clamp(min=1)).all()
    for result, s in spread(compute, FP32, seed=1).items():
        assert s is not None
        assert 0.1 * U * s.want.abs().mean() <= s.floor <= 200 * U * s.want.abs().max().clamp(min=1), result
