"""Disturbed runs in one go or one by one: they agree, the seed decides, and what reads numbers runs one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from roundings import FP32, U, X, one
from torch import Tensor

from harness.oracle import rounding
from harness.oracle.rounding import spread
from harness.oracle.shadows import NeedsSeparateRuns, NumbersStayInside, Shadows
from reference.dtypes import FORMATS


def block() -> dict[str, Tensor | None]:
    """A small transformer block, forward and backward."""
    g = torch.Generator().manual_seed(0)
    H, S, heads = 16, 6, 2

    def parameter(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=g, dtype=torch.float64) * scale).requires_grad_()

    x, w1, w2 = parameter(2, S, H), parameter(4 * H, H, scale=0.25), parameter(H, 4 * H, scale=0.125)
    qkv, out, norm, bias = parameter(3 * H, H, scale=0.25), parameter(H, H, scale=0.25), parameter(H), parameter(4 * H)
    h = F.layer_norm(x, (H,), norm)
    q, k, v = F.linear(h, qkv).view(2, S, 3, heads, H // heads).permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(H // heads)
    scores = scores.masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf)
    y = x + F.linear((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, S, H), out)
    y = y + F.linear(F.gelu(F.linear(F.rms_norm(y, (H,), norm), w1, bias)), w2)
    loss = F.cross_entropy(y.flatten(0, 1), torch.arange(12) % H, reduction="sum")
    torch.autograd.backward(loss)
    named = {"x": x, "w1": w1, "w2": w2, "qkv": qkv, "out": out, "norm": norm, "bias": bias}
    return {"y": y, "loss": loss, **{f"{name}.grad": p.grad for name, p in named.items()}}


def test_runs_together_and_one_by_one_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """In distribution: floors over 32 runs within a factor of 1.3, slopes within 2, elements within 3."""
    for name in ("fp32", "bf16"):
        together = spread(block, FORMATS[name], runs=32, seed=5)
        with monkeypatch.context() as patch:
            patch.setattr(rounding, "Shadows", _refusing)
            separate = spread(block, FORMATS[name], runs=32, seed=5)
        for tensor, s in together.items():
            other = separate[tensor]
            assert s is not None
            assert other is not None
            assert not torch.equal(s.residuals, other.residuals), "these are no longer different engines"
            assert torch.equal(s.want, other.want)
            assert 1 / 1.3 < s.floor / other.floor < 1.3 or s.want.dim() == 0, tensor
            assert 1 / 2 < s.slope_rms / other.slope_rms < 2, tensor
            ratio = s.residuals.square().mean(0).sqrt() / other.residuals.square().mean(0).sqrt()
            assert ((ratio > 1 / 3) & (ratio < 3) | (s.deviation < s.floor / 100)).all(), tensor


def _refusing(*args: Any) -> Shadows:
    raise NeedsSeparateRuns("for the test")


def test_the_reference_computes_undisturbed_beside_its_shadows() -> None:
    seen: list[dict[str, Tensor | None]] = []

    def compute() -> dict[str, Tensor | None]:
        seen.append(block())
        return seen[-1]

    spread(compute, FORMATS["bf16"])
    assert len(seen) == 3, "undisturbed, beside its shadows, and undisturbed again, since parts were rewritten"
    for name in ("y", "x.grad", "qkv.grad"):
        plain, beside, _ = (run[name] for run in seen)
        assert plain is not None
        assert beside is not None
        # Not the same bits: a fused operation and its parts round differently, in float64.
        assert torch.allclose(plain, beside, rtol=1e-12, atol=1e-14)


def test_a_seed_decides_everything_and_no_state_is_left_behind() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one_run, again, other = (spread(block, FP32, seed=s) for s in (1, 1, 2))
    for name, s in one_run.items():
        same, different = again[name], other[name]
        assert s is not None
        assert same is not None
        assert different is not None
        assert torch.equal(s.residuals, same.residuals)
        assert not torch.equal(s.residuals, different.residuals)
        assert torch.equal(s.want, different.want)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() is torch.float32
    with pytest.raises(RuntimeError, match="mine"):
        spread(_failing, FP32)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(X * 3, X + X + X), "no mode is left on"


def _failing() -> dict[str, Tensor | None]:
    raise RuntimeError("mine")


READERS: dict[str, Callable[[], Tensor]] = {
    "item": lambda: X * float((X * 3).sum()),
    "if": lambda: X * 3 if (X * 3).sum() > 0 else X * 5,
    "numpy": lambda: torch.from_numpy(np.tanh((X * 3).numpy())),
    "array": lambda: torch.from_numpy(np.asarray(X * 3) + 1),
    "tolist": lambda: torch.tensor((X * 3).tolist(), dtype=torch.float64),
    "mask": lambda: (X * 3)[X * 3 > 0.5],
    "nonzero": lambda: (X * 3)[(X * 3 > 0.5).nonzero()[:, 0]],
    "bits": lambda: (X * 3).view(torch.int64).add(2).view(torch.float64) * 3,
    "bernoulli": lambda: X * 3 * torch.bernoulli((X * 3).sigmoid()),
}


@pytest.mark.parametrize("name", READERS)
def test_what_looks_at_numbers_runs_one_by_one(name: str) -> None:
    calls = []

    def compute() -> Tensor:
        calls.append(name)
        return READERS[name]()

    s = one(compute, runs=4)
    assert len(calls) > 2 + 3, "one undisturbed, one attempt, four disturbed"
    assert (s.deviation > 0).any()
    assert (s.deviation <= 100 * U * s.want.abs().max()).all()
    calls.clear()
    one(lambda: (calls.append(name), X * 3)[1], runs=4)
    assert len(calls) == 2


def test_numbers_that_no_rounding_reaches_may_be_read() -> None:
    def compute() -> Tensor:
        calls.append(float(X[0, 0]))
        return X * (2 if bool((X > 0).any()) else 3) * X[X > 0].sum()

    calls: list[float] = []
    assert (one(compute).deviation > 0).all()
    assert len(calls) == 2


def test_the_guard_stops_disturbed_numbers_only() -> None:
    mode = Shadows(FP32, 0, 2)
    with NumbersStayInside(mode), mode:
        y = X * 3
        assert X.numpy().shape == y.shape == (6, 5)
        with pytest.raises(NeedsSeparateRuns, match="numpy hands numbers to Python"):
            y[0].numpy()
