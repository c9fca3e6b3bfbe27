"""Lattice data: sums of products are exact in the dtype itself, in any order and however they are split."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from drawing import exact_linear_cases
from hypothesis import given
from hypothesis import strategies as st

from reference.lattice import LARGEST_USEFUL, Sum, Term, lattice_limits
from reference.linear import LinearCase, LinearRecipes, expected, tensors
from reference.mesh import Mesh
from reference.recipe import Recipe

MANY = Mesh.of(tp=1, dp=LARGEST_USEFUL)
roles = st.sampled_from(["a", "b", "c"])
terms = st.builds(Term, st.integers(1, 12), st.lists(roles, min_size=1, max_size=2).map(tuple))
precisions = st.sampled_from([8, 11, 24, 53])
some_sums = st.lists(
    st.builds(Sum, st.lists(terms, min_size=1, max_size=2).map(tuple), precisions), min_size=1, max_size=4
)


def summed(terms_first: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """The sum over the first dimension, rounded after every addition, in a random order, split at random places."""
    order = torch.from_numpy(rng.permutation(len(terms_first)))
    places = np.sort(rng.integers(0, len(order) + 1, size=rng.integers(0, 8)))
    partials = [one_by_one(terms_first[piece]) for piece in torch.tensor_split(order, places.tolist())]
    return one_by_one(torch.stack([partials[i] for i in rng.permutation(len(partials))]))


def one_by_one(terms_first: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(terms_first[0]) if len(terms_first) else terms_first.sum(0)
    for term in terms_first:
        total = total + term
    return total


def in_dtype(case: LinearCase, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """What `expected` computes, in the case's dtype, rounding after every operation."""
    made = {name: t.to(case.format.torch_dtype) for name, t in tensors(case).items()}
    weight, out = made["weight"], {}
    products, grads = [], []
    for m, dims in enumerate(case.leading):
        x = made[f"input[{m}]"].flatten(1, -2)
        g = made[f"output[{m}].grad"].flatten(1, -2)
        forward = x.movedim(-1, 0)[..., None] * weight.T[:, None, None, :]  # [I, R, T, O]
        if case.bias and not case.skip_bias_add:
            forward = torch.cat([forward, made["bias"].expand(1, *forward.shape[1:])])
        out[f"output[{m}]"] = summed(forward, rng).reshape(case.replicas, *dims, -1)
        backward = g.movedim(-1, 0)[..., None] * weight[:, None, None, :]  # [O, R, T, I]
        out[f"input[{m}].grad"] = summed(backward, rng).reshape(case.replicas, *dims, -1)
        products.append((g[..., None] * x[..., None, :]).movedim(1, 0))  # [T, R, O, I]
        grads.append(g.movedim(1, 0))
    kept = torch.promote_types(weight.dtype, torch.float32) if case.main_grad else weight.dtype
    for name, parts in (("weight.grad", products), ("bias.grad", grads)):
        if case.main_grad:
            parts = [summed(part, rng)[None] for part in parts]
        out[name] = summed(torch.cat(parts).to(kept), rng)
    return out


def wrong(case: LinearCase, rng: np.random.Generator) -> list[str]:
    """The results that are not exact."""
    got = in_dtype(case, rng)
    want = {name: t for name, t in expected(case, tensors(case)).items() if t is not None and name in got}
    return [name for name, t in want.items() if not torch.equal(got[name].to(torch.float64), t)]


@given(exact_linear_cases, st.integers(0, 2**32))
def test_linear_layers_are_exact_in_every_dtype(case: LinearCase, seed: int) -> None:
    assert wrong(case, np.random.default_rng(seed)) == []


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize("sizes", [(255, 256, 1), (12, 12, 256), (100, 7, 31), (7, 5, 50)])
def test_sums_as_large_as_can_be_are_exact(dtype: str, sizes: tuple[int, int, int]) -> None:
    """All of one sign, and on some replica at the limit, so that sums reach their bounds, over two micro-batches."""
    inside, outside, tokens = sizes
    leading = ((tokens,),) if tokens == 1 else ((tokens // 2,), (tokens - tokens // 2,))
    same_sign = LinearRecipes(*[Recipe("constant_per_rank")] * 4)
    for recipes in (LinearRecipes(), same_sign):
        case = LinearCase(MANY, "row", inside, outside, leading, dtype=dtype, bias=True, recipes=recipes)
        assert wrong(case, np.random.default_rng(0)) == []


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_main_gradient_does_not_fit_the_dtype_of_the_parameter(dtype: str) -> None:
    """The total over micro-batches is exact in fp32 only, so that one kept in the parameter's dtype is seen."""
    case = LinearCase(Mesh.of(tp=1, dp=64), "column", 4, 4, ((1,),) * 3, dtype=dtype, main_grad=True)
    low = dataclasses.replace(case, main_grad=False)
    total = expected(case, tensors(case))["weight.grad"]
    assert total is not None
    assert not torch.equal(total, total.to(case.format.torch_dtype).to(torch.float64))
    assert wrong(case, np.random.default_rng(0)) == []
    assert wrong(low, np.random.default_rng(0)) == []


def test_with_larger_limits_bf16_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    case = LinearCase(Mesh.of(tp=1, dp=64), "column", 2, 2, ((2,),), dtype="bf16")
    assert wrong(case, np.random.default_rng(0)) == []

    def too_large(found: Sequence[Sum]) -> dict[str, int]:
        return {name: 2 * limit for name, limit in lattice_limits(found).items()}

    monkeypatch.setattr("reference.linear.lattice_limits", too_large)
    assert set(wrong(case, np.random.default_rng(0))) == {"output[0]", "input[0].grad", "weight.grad"}


@pytest.mark.parametrize(("count", "limit"), [(9, 28), (32, 8), (256, 1)])
def test_the_limit_of_a_sum_is_the_last_that_is_exact(count: int, limit: int) -> None:
    """With one more, a sum can be 257, which bf16 does not hold."""
    assert lattice_limits([Sum((Term(count, ("a",)),), 8)]) == {"a": limit}
    values = [limit] * count
    for _ in range(257 - sum(values)):
        values[values.index(limit)] += 1
    assert sum(values) == 257
    assert max(values) == limit + 1
    assert float(one_by_one(torch.tensor(values, dtype=torch.bfloat16))) != 257


@given(some_sums)
def test_limits_fit_and_no_limit_could_be_larger(found: list[Sum]) -> None:
    limits = lattice_limits(found)
    assert set(limits) == {name for one in found for term in one.terms for name in term.factors}
    assert all(one.bound(limits) <= 2**one.precision for one in found)
    for name, limit in limits.items():
        larger = {**limits, name: limit + 1}
        assert limit == LARGEST_USEFUL or any(one.bound(larger) > 2**one.precision for one in found)


def test_too_many_terms_are_refused() -> None:
    refusal = "sum of 257 terms cannot be exact with 8 significand bits: at most 256 terms"
    with pytest.raises(ValueError, match=refusal):
        lattice_limits([Sum((Term(256, ("input", "weight")), Term(1, ("bias",))), 8)])
    with pytest.raises(ValueError, match=refusal):
        LinearCase(Mesh.of(tp=1), "row", 256, 1, dtype="bf16")
