"""The expected values of an embedding against torch's lookup and autograd."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given

import strategies.embedding
from reference.embedding import EmbeddingCase, EmbeddingRecipes, Tensors, expected, tensors
from reference.mesh import Mesh
from reference.recipe import EXACT_KINDS, Recipe
from strategies.scope import Scope

FULL = Scope(max_world=8, features=frozenset(strategies.embedding.FEATURES))


def _exact(case: EmbeddingCase) -> EmbeddingCase:
    """Where nothing rounds, everything is finite and every id is valid."""
    recipes = [
        Recipe(recipe.kind if recipe.kind in EXACT_KINDS else "lattice", recipe.seed)
        for recipe in (case.recipes.weight, case.recipes.output_grad)
    ]
    return dataclasses.replace(case, recipes=EmbeddingRecipes(*recipes), invalid="")


exact_cases = strategies.embedding.cases(FULL).map(_exact)


def by_autograd(case: EmbeddingCase, given: Tensors) -> dict[str, torch.Tensor | None]:
    """Each replica's table, looked up forward and backward for each micro-batch in turn."""
    out: dict[str, list[torch.Tensor]] = {}
    for r in range(case.replicas):
        weight = given["weight"].clone().requires_grad_(case.weight_requires_grad)
        for m in range(len(case.leading)):
            y = F.embedding(given[f"input[{m}]"][r], weight, padding_idx=case.padding_idx)
            if case.trains:
                y.backward(given[f"output[{m}].grad"][r])
            out.setdefault(f"output[{m}]", []).append(y.detach())
        if weight.grad is not None:
            out.setdefault("weight.grad", []).append(weight.grad)
    return {"weight.grad": None, **{name: torch.stack(parts) for name, parts in out.items()}}


@given(exact_cases)
def test_expected_is_what_autograd_computes(case: EmbeddingCase) -> None:
    made = tensors(case)
    got, want = expected(case, made), by_autograd(case, made)
    assert set(got) == set(want)
    for name, value in got.items():
        other = want[name]
        assert (value is None) == (other is None), name
        if value is not None and other is not None:
            assert value.dtype == torch.float64
            assert torch.equal(value, other), name


@given(exact_cases)
def test_padding_gets_no_gradient(case: EmbeddingCase) -> None:
    grad = expected(case, tensors(case))["weight.grad"]
    if grad is not None:
        assert grad.shape == (case.replicas, case.rows, case.hidden)
        assert not grad[:, case.vocabulary :].any()
        assert case.padding_idx is None or not grad[:, case.padding_idx].any()


@given(exact_cases)
def test_replicas_have_ids_of_their_own_and_share_the_table(case: EmbeddingCase) -> None:
    made = tensors(case)
    assert made["weight"].shape == (case.rows, case.hidden)
    assert case.replicas * case.parallel_size == case.mesh.size
    for m, dims in enumerate(case.leading):
        ids = made[f"input[{m}]"]
        assert ids.shape == (case.replicas, *dims)
        assert ids.dtype == torch.int64
        assert bool(((ids >= 0) & (ids < case.vocabulary)).all())
        assert made[f"output[{m}].grad"].shape == (case.replicas, *dims, case.hidden)


def test_replicas_and_micro_batches_differ() -> None:
    made = tensors(EmbeddingCase(Mesh.of(tp=2, dp=2), 100, 2, ((8,), (8,))))
    ids = [made[f"input[{m}]"][r] for m in range(2) for r in range(2)]
    assert not any(torch.equal(a, b) for i, a in enumerate(ids) for b in ids[:i])


@pytest.mark.parametrize(("invalid", "wrong"), [("negative", -1), ("past", 5)])
def test_an_invalid_case_has_one_id_out_of_range(invalid: Any, wrong: int) -> None:
    made = tensors(EmbeddingCase(Mesh.of(tp=2, dp=2), 5, 2, ((4,), (3,)), padding=3, invalid=invalid))
    assert made["input[0]"][:, -1].tolist() == [wrong, wrong]
    assert bool(((made["input[0]"][:, :-1] >= 0) & (made["input[0]"][:, :-1] < 5)).all())
    assert bool(((made["input[1]"] >= 0) & (made["input[1]"] < 5)).all())


def test_a_frozen_table_has_no_gradient() -> None:
    case = EmbeddingCase(Mesh.of(tp=2), 4, 2, ((2,), (1,)))
    for changes in ({"weight_requires_grad": False}, {"backward": "never"}):
        frozen = dataclasses.replace(case, **changes)  # type: ignore[arg-type]
        want = expected(frozen, tensors(frozen))
        assert [name for name, value in want.items() if value is None] == ["weight.grad"]
        assert not frozen.trains


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "fp8"}, "unknown dtype 'fp8'"),
        ({"axis": "dp"}, "the layer's axis 'dp' is not in the mesh tp=2"),
        ({"vocabulary": 1}, "vocabulary 1 on 2 ranks: expected at least one row a rank"),
        ({"hidden": 0}, "hidden 0 must be at least 1"),
        ({"padding": -1}, "padding -1 at least 0"),
        ({"padding_idx": 4}, "padding_idx 4: expected a token from 0 to 3"),
        ({"padding_idx": -1}, "padding_idx -1: expected a token from 0 to 3"),
        ({"leading": ()}, "leading (): expected one or more micro-batches"),
        ({"leading": ((2, 0),)}, "leading ((2, 0),): expected one or more micro-batches of dimensions of at least 1"),
        ({"mesh": Mesh.of(dp=2), "axis": "dp"}, "axis 'dp' is not the default group"),
        ({"backward": "later"}, "backward is 'later': expected one of 'immediate'"),
        ({"invalid": "nan"}, "invalid is 'nan': expected one of '', 'negative', 'past'"),
        ({"dtype": "bf16", "leading": ((300,),)}, "cannot be exact with 8 significand bits"),
    ],
)
def test_options_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    plain = EmbeddingCase(Mesh.of(tp=2), 4, 3)
    with pytest.raises(ValueError, match=r"\S") as caught:
        dataclasses.replace(plain, **changes)
    assert message in str(caught.value)


def test_a_table_whose_main_gradient_is_kept_in_the_dtype_shows() -> None:
    """Every second micro-batch is so small that a total in the dtype loses it, and exact in fp32."""
    case = EmbeddingCase(Mesh.of(tp=1), 2, 4, leading=((4,), (4,)), dtype="bf16", main_grad=True)
    given = tensors(case)
    total = expected(case, given)["weight.grad"]
    assert total is not None
    assert torch.equal(total.to(torch.float32).to(torch.float64), total)
    assert not torch.equal(total.to(torch.bfloat16).to(torch.float64), total)
    plain = dataclasses.replace(case, main_grad=False)
    want = expected(plain, tensors(plain))["weight.grad"]
    assert want is not None
    assert torch.equal(want.to(torch.bfloat16).to(torch.float64), want)
