"""Attention computed as flash attention does it agrees with the written-out softmax, however large the logits are."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.observation import LocalTensor, Observation
from harness.oracle.expectation import expect
from harness.oracle.within import compare_within
from reference.dtypes import FORMATS
from reference.layout import Whole
from reference.mesh import Mesh

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Tensors = dict[str, Tensor | None]


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def looked_at(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A reference that cannot be run with copies beside it."""
    y = written_out(q, k, v)
    return y if float(y.detach().abs().max()) > 0 else -y


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def run(attention: Attention, given: dict[str, Tensor], dtype: torch.dtype) -> Tensors:
    """Output and gradients."""
    q, k, v = (given[name].to(dtype, copy=True).requires_grad_() for name in "qkv")
    y = attention(q, k, v)
    y.backward(given["y.grad"].to(dtype))
    return {"y": y.detach(), "q.grad": q.grad, "k.grad": k.grad, "v.grad": v.grad}


def drawn(dtype: str, deviation: float, seed: int) -> dict[str, Tensor]:
    """Queries and keys whose logits have this deviation, 4 heads, 32 tokens of 16 features, held in the dtype."""
    g = torch.Generator().manual_seed(seed)
    scale = {"q": math.sqrt(deviation), "k": math.sqrt(deviation)}
    made = {n: torch.randn(1, 4, 32, 16, generator=g) * scale.get(n, 1.0) for n in ("q", "k", "v", "y.grad")}
    return {n: t.to(FORMATS[dtype].torch_dtype).to(torch.float64) for n, t in made.items()}


def wrong(dtype: str, got: Tensors, given: dict[str, Tensor], reference: Attention = written_out) -> set[str]:
    """The results that are beyond a limit."""
    want = expect(lambda: run(reference, given, torch.float64), FORMATS[dtype], given=given)
    found = set()
    for name, value in got.items():
        assert value is not None
        local = LocalTensor(value.to(torch.float64).numpy(), "any")
        judged = compare_within(name, want[name], Whole(), "any", Mesh.of(tp=1), [Observation({name: local})])
        found |= {name} if judged.finding is not None else set()
    return found


@pytest.mark.parametrize("reference", [written_out, looked_at])
@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16", "fp16"])
@pytest.mark.parametrize("deviation", [1, 9, 36])
def test_flash_attention_holds(dtype: str, deviation: float, reference: Attention) -> None:
    for seed in range(4):
        given = drawn(dtype, deviation, seed)
        got = run(flash, given, FORMATS[dtype].torch_dtype)
        assert not wrong(dtype, got, given, reference), seed


@pytest.mark.parametrize(("dtype", "by"), [("fp32", 2**-16), ("fp64", 2**-45), ("fp16", 2**-6), ("bf16", 2**-3)])
@pytest.mark.parametrize("deviation", [1, 4])
def test_a_factor_is_found_beside_it(dtype: str, by: float, deviation: float) -> None:
    """Of each result, although the sum in the backward of softmax has errors of its own."""
    given = drawn(dtype, deviation, 0)
    got = run(flash, given, FORMATS[dtype].torch_dtype)
    assert wrong(dtype, {name: value * (1 + by) for name, value in got.items() if value is not None}, given) == set(got)
