"""The expected losses and gradients against torch's cross entropy and autograd, in float64."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st

import strategies.cross_entropy
from reference.cross_entropy import (
    CrossEntropyCase,
    CrossEntropyRecipes,
    Tensors,
    expected,
    shares,
    tensors,
)
from reference.cross_entropy_targets import ignores, least_valid
from reference.cross_entropy_traffic import needed
from reference.mesh import Mesh
from reference.recipe import Recipe
from strategies.scope import Scope

FULL = Scope(max_world=8, features=frozenset(strategies.cross_entropy.FEATURES))


def _plain(case: CrossEntropyCase) -> CrossEntropyCase:
    """Finite, valid, and not so large that float64 loses what other columns add."""
    recipes = [
        Recipe("normal" if recipe.kind == "near_overflow" else recipe.kind, recipe.seed)
        for recipe in (case.recipes.logits, case.recipes.loss_grad)
    ]
    return dataclasses.replace(case, recipes=CrossEntropyRecipes(*recipes), invalid="")


cases = strategies.cross_entropy.cases(FULL).map(_plain)


def by_autograd(case: CrossEntropyCase, given: Tensors) -> dict[str, torch.Tensor | None]:
    """torch's own loss of each replica and micro-batch in turn, and what its definition lacks."""
    out: dict[str, torch.Tensor | None] = {}
    for m in range(len(case.leading)):
        losses, grads = [], []
        for r in range(case.replicas):
            logits = given[f"logits[{m}]"][r].clone().requires_grad_()
            loss = _loss(case, logits[..., : case.vocabulary].flatten(0, -2), given[f"targets[{m}]"][r].flatten())
            loss = loss.view(case.loss_shape(m)[1:])
            torch.autograd.backward(loss, given[f"loss[{m}].grad"][r])
            losses.append(loss.detach())
            grads.append(logits.grad)
        out[f"loss[{m}]"] = torch.stack(losses)
        out[f"logits[{m}].grad"] = torch.stack(grads) if case.trains else None  # type: ignore[arg-type]
    return out


def _loss(case: CrossEntropyCase, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    alpha, valid = case.label_smoothing, t != case.ignore_index
    loss = F.cross_entropy(x, t, ignore_index=case.ignore_index, reduction="none")
    if alpha and case.smoothing == "torch":
        loss = F.cross_entropy(x, t, ignore_index=case.ignore_index, reduction="none", label_smoothing=alpha)
    elif alpha:
        others = (x.logsumexp(-1, keepdim=True) - x).sum(-1) - loss
        loss = torch.where(valid, (1 - alpha) * loss + alpha / (case.vocabulary - 1) * others, 0.0)
    loss = loss + torch.where(valid, case.z_loss * x.logsumexp(-1).square(), 0.0)
    if case.reduction == "none":
        return loss
    return loss.sum() / (max(1, int(valid.sum())) if case.reduction == "mean" else 1)


@given(cases)
def test_expected_is_what_torch_computes(case: CrossEntropyCase) -> None:
    made = tensors(case)
    got, want = expected(case, made), by_autograd(case, made)
    assert set(got) == set(want)
    for name, value in got.items():
        other = want[name]
        assert (value is None) == (other is None), name
        if value is not None and other is not None:
            assert value.dtype == torch.float64
            scale = max(1.0, float(made["logits[0]"].abs().max()))
            # A probability is rounded beside 1, however little of it is left.
            grads = [float(made[f"loss[{m}].grad"].abs().max()) for m in range(len(case.leading))]
            largest = max(1e-290, float(other.abs().max()), *grads)
            torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-13 * scale * largest, msg=name)


@given(cases, st.sampled_from([math.inf, -math.inf, math.nan, 1e30]))
def test_padded_columns_and_ignored_tokens_may_hold_anything(case: CrossEntropyCase, garbage: float) -> None:
    made = tensors(case)
    other = {name: tensor.clone() for name, tensor in made.items()}
    for m in range(len(case.leading)):
        other[f"logits[{m}]"][..., case.vocabulary :] = garbage
        other[f"logits[{m}]"][made[f"targets[{m}]"] == case.ignore_index] = garbage
    want = expected(case, made)
    for name, value in expected(case, other).items():
        same = want[name]
        assert (value is None) == (same is None)
        assert value is None or same is None or torch.equal(value, same), name
        if value is not None and name.endswith(".grad"):
            assert not value[..., case.vocabulary :].any()


@given(cases)
def test_what_a_case_says_of_its_targets(case: CrossEntropyCase) -> None:
    made = tensors(case)
    valid = [made[f"targets[{m}]"] != case.ignore_index for m in range(len(case.leading))]
    assert ignores(case) == any(not bool(v.all()) for v in valid)
    assert least_valid(case) == min(int(v[r].sum()) for v in valid for r in range(case.replicas))
    for m, which in enumerate(valid):
        targets = made[f"targets[{m}]"][which]
        assert bool(((targets >= 0) & (targets < case.vocabulary)).all())
        if case.ignored == "all" or (case.ignored == "micro_batch" and m == len(valid) - 1):
            assert not which.any()
        if case.ignored == "replica":
            assert not which[0].any()


@pytest.mark.parametrize(
    ("invalid", "ignore_index", "target"),
    [("negative", -100, -1), ("negative", -1, -2), ("past", -100, 5), ("past", 5, 6)],
)
def test_an_invalid_case_has_one_target_out_of_range(invalid: str, ignore_index: int, target: int) -> None:
    options: dict[str, Any] = {"invalid": invalid, "ignore_index": ignore_index, "padding": 3}
    case = CrossEntropyCase(Mesh.of(tp=2, dp=2), 5, ((4,), (3,)), **options)
    made = tensors(case)
    assert made["targets[0]"][:, -1].tolist() == [target, target] == [case.out_of_range] * 2
    assert bool((made["targets[0]"][:, :-1] < 5).all())
    assert bool((made["targets[1]"] >= 0).all())


def test_shares_are_the_two_definitions() -> None:
    case = CrossEntropyCase(Mesh.of(tp=2), 5, label_smoothing=0.1)
    of_target, of_every = shares(case)
    assert of_every == pytest.approx(0.1 / 5)
    assert of_target + of_every == pytest.approx(0.9 + 0.1 / 5)
    of_target, of_every = shares(dataclasses.replace(case, smoothing="megatron"))
    assert of_every == pytest.approx(0.1 / 4)  # each of the others
    assert of_target + of_every == pytest.approx(0.9)  # the target's own
    assert shares(dataclasses.replace(case, label_smoothing=0.0, smoothing="megatron")) == (1, 0)


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "fp16", "bf16"])
def test_the_scale_multiplies_the_logits_within_the_format(dtype: str) -> None:
    case = CrossEntropyCase(Mesh.of(tp=2), 64, ((9,),), dtype=dtype, scale=1000)
    made = tensors(case)["logits[0]"]
    assert float(made.abs().max()) == 4000
    plain = tensors(dataclasses.replace(case, scale=1))["logits[0]"]
    assert torch.equal(made, (plain * 1000).to(case.format.torch_dtype).double())
    huge = dataclasses.replace(case, recipes=CrossEntropyRecipes(Recipe("near_overflow", inject="inf", at=5)))
    values = tensors(huge)["logits[0]"].flatten()
    assert values[5] == math.inf
    assert float(values[6:].abs().max()) == case.format.largest


def test_no_token_at_all_has_a_mean_of_zero() -> None:
    case = CrossEntropyCase(Mesh.of(tp=2, dp=2), 3, ((2,), (2,)), reduction="mean", ignored="replica")
    want = expected(case, tensors(case))
    assert want["loss[0]"] is not None
    assert want["loss[0]"][0] == 0
    assert want["loss[0]"][1] > 0


def test_traffic_is_three_all_reduces_forward() -> None:
    case = CrossEntropyCase(Mesh.of(tp=2, dp=2), 3, ((2, 3), (4, 1)), dtype="bf16", label_smoothing=0.1)
    sent = needed(case)
    assert [(one.phase, one.micro_batch, one.operation, one.elements, one.dtype) for one in sent] == [
        ("forward", m, "all_reduce", tokens, "float32") for m, tokens in ((0, 6), (1, 4)) for _ in range(3)
    ]
    assert needed(dataclasses.replace(case, mesh=Mesh.of(tp=1, dp=2))) == ()
    assert {one.dtype for one in needed(dataclasses.replace(case, dtype="fp64"))} == {"float64"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "fp8"}, "unknown dtype 'fp8'"),
        ({"axis": "dp"}, "the loss' axis 'dp' is not in the mesh tp=2"),
        ({"mesh": Mesh.of(dp=2), "axis": "dp"}, "axis 'dp' is not the default group"),
        ({"vocabulary": 0}, "vocabulary 0 and scale 1 must be at least 1, padding 0 at least 0"),
        ({"padding": -1}, "padding -1 at least 0"),
        ({"scale": 0}, "scale 0 must be at least 1"),
        ({"leading": ()}, "leading (): expected one or more micro-batches"),
        ({"leading": ((2, 0),)}, "leading ((2, 0),): expected one or more micro-batches of dimensions of at least 1"),
        ({"reduction": "max"}, "reduction is 'max': expected one of 'none', 'mean', 'sum'"),
        ({"smoothing": "nemo"}, "smoothing is 'nemo': expected one of 'torch', 'megatron'"),
        ({"ignored": "few"}, "ignored is 'few': expected one of 'none', 'some', 'micro_batch', 'replica', 'all'"),
        ({"backward": "later"}, "backward is 'later': expected one of 'immediate'"),
        ({"invalid": "nan"}, "invalid is 'nan': expected one of '', 'negative', 'past'"),
        ({"label_smoothing": 1.0}, "label_smoothing 1.0 and z_loss 0.0: expected from 0 up, and below 1"),
        ({"label_smoothing": math.nan}, "label_smoothing nan"),
        ({"z_loss": -1.0}, "z_loss -1.0"),
        ({"z_loss": math.inf}, "z_loss inf"),
        ({"vocabulary": 1, "label_smoothing": 0.1, "smoothing": "megatron"}, "spread over the other classes"),
        (
            {"label_smoothing": 0.1, "recipes": CrossEntropyRecipes(Recipe(inject="-inf"))},
            "label smoothing and a logit of -inf",
        ),
        ({"recipes": CrossEntropyRecipes(loss_grad=Recipe(inject="inf"))}, "an infinite gradient"),
    ],
)
def test_options_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    plain = CrossEntropyCase(Mesh.of(tp=2), 4)
    with pytest.raises(ValueError, match=r"\S") as caught:
        dataclasses.replace(plain, **changes)
    assert message in str(caught.value)
