"""The reference of mixed-precision optimizers against torch.optim in float64, what it decides, and what a case may not
be."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import strategies.mixed_precision
from reference.codec import decode, encode
from reference.loss_scale import Scaling
from reference.mesh import Mesh
from reference.mixed_precision import (
    Group,
    MixedParameter,
    MixedPrecisionCase,
    MixedPrecisionRecipes,
    Overflow,
)
from reference.mixed_precision_steps import expected, gradient, handed, limit, plan, tensors
from reference.recipe import Recipe
from strategies.scope import Scope

FULL = Scope(max_world=8, features=frozenset(strategies.mixed_precision.FEATURES))
CASES = strategies.mixed_precision.cases(FULL).filter(lambda case: case.invalid is None)
EIGHT = Mesh.of(tp=2, pp=2, dp=2)
_KEYS = {"momentum": "momentum_buffer"}


def of_torch(case: MixedPrecisionCase) -> dict[str, torch.Tensor]:
    """Masters and state by torch.optim, LambdaLR and clip_grad_norm_, in float64."""
    given_, found = tensors(case), dict[str, torch.Tensor]()
    values = {i: torch.nn.Parameter(given_[f"parameter{i}"].clone()) for i in case.trained}
    groups = [
        {
            "params": [values[i] for i in case.trained if case.group_of(i) == number],
            "lr": group.lr,
            "weight_decay": group.weight_decay,
        }
        for number, group in enumerate(case.groups)
    ]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, momentum=case.momentum)
    if case.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, betas=case.betas, eps=case.adam_eps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, case.factor)
    for step, planned in enumerate(plan(case, given_)):
        if case.reload == step > 0:
            for i, value in values.items():
                value.data.copy_(given_[f"reloaded{i}"])
        if not planned.skipped:
            for i, value in values.items():
                value.grad = gradient(case, given_, i, step).mean(0)
            if case.clip:
                norm = torch.nn.utils.get_total_norm([v.grad for v in values.values() if v.grad is not None])
                by = min(1.0, limit(case) / (float(norm) + case.clip_eps)) if norm + case.clip_eps else 1.0
                for value in values.values():
                    value.grad *= by  # type: ignore[operator]
                found |= {f"norm[{step}]": norm.view(1), f"coefficient[{step}]": torch.tensor([by]).double()}
            optimizer.step()
            schedule.step()
        for i, value in values.items():
            found[f"master{i}[{step}]"] = value.detach().clone()
            for kind in case.states:
                kept = optimizer.state.get(value, {}).get(_KEYS.get(kind, kind))
                found[f"{kind}{i}[{step}]"] = torch.zeros_like(value) if kept is None else kept.clone()
    return found


@settings(max_examples=60)
@given(CASES)
def test_steps_are_those_of_torch(case: MixedPrecisionCase) -> None:
    """Both are in float64; they differ in the order of operations."""
    given_ = tensors(case)
    got, want = expected(case, given_, plan(case, given_)), of_torch(case)
    for name, value in want.items():
        found = got.get(name)
        if found is None:
            assert name.startswith("master"), name
            assert not case.has_master(int(name[6:].partition("[")[0])), name
            found = got[name.replace("master", "parameter")]
        assert found is not None
        torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-7, msg=name)
        copy = got.get(name.replace("[", ".copy["))
        assert copy is None or torch.equal(copy, found), name


@settings(max_examples=60)
@given(CASES)
def test_what_is_exact_fits_fp32_and_the_model_is_rounded(case: MixedPrecisionCase) -> None:
    assert decode(MixedPrecisionCase, encode(case)) == case
    if case.exact:
        given_ = tensors(case)
        for name, value in expected(case, given_, plan(case, given_)).items():
            assert value is not None
            i = int(name.partition("[")[0].removesuffix(".copy").lstrip("abcdefghijklmnopqrstuvwxyz_"))
            fmt = case.format_of(i).torch_dtype if name.startswith("parameter") else torch.float32
            assert torch.equal(value.to(fmt).to(torch.float64), value), name


def test_masters_hold_more_than_the_model() -> None:
    """Four steps of 1/16 of a number of one digit: in bf16 none of them would show beside 64."""
    case = MixedPrecisionCase(Mesh.of(dp=1), dtype="bf16", groups=(Group(2.0**-4),), steps=4)
    given_ = {"parameter0": torch.tensor([64.0]).double()}
    given_ |= {f"gradient0[{step}]": torch.tensor([[-1.0]]).double() for step in range(4)}
    got = expected(case, given_, plan(case, given_))
    assert [float(got[f"master0[{step}]"]) for step in range(4)] == [64.0625, 64.125, 64.1875, 64.25]  # type: ignore[arg-type]
    assert [float(got[f"parameter0[{step}]"]) for step in range(4)] == [64.0, 64.0, 64.0, 64.0]  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", range(8))
def test_an_overflow_on_one_rank_skips_the_step(rank: int) -> None:
    parameters = (MixedParameter(2, split=True), MixedParameter(2, stage=1))
    case = MixedPrecisionCase(EIGHT, parameters, steps=2, overflows=(Overflow(0, "nan", EIGHT.names, rank),))
    given_ = tensors(case)
    bad = [
        r for r in range(8) for i in (0, 1)
        if case.holds(i, r) and handed(case, given_, i, 0, r, 1.0).isnan().any()
    ]  # fmt: skip
    assert bad == [rank]
    assert [one.skipped for one in plan(case, given_)] == [True, False]
    assert [one.t for one in plan(case, given_)] == [0, 0]


def test_a_large_scale_overflows_in_fp16_alone() -> None:
    scaling = Scaling(initial=2.0**15, growth_interval=3)
    for dtype, main_grad, skips in (("fp16", False, True), ("fp16", True, False), ("bf16", False, False)):
        case = MixedPrecisionCase(Mesh.of(dp=1), dtype=dtype, main_grad=main_grad, scaling=scaling)
        given_ = {"parameter0": torch.ones(1).double(), "gradient0[0]": torch.tensor([[2.0]]).double()}
        (planned,) = plan(case, given_)
        assert planned.skipped == skips
        assert planned.after.scale == 2.0 ** (14 if skips else 15)


def test_who_has_no_gradient_is_spared() -> None:
    parameters = (MixedParameter(1, "some"),)
    case = MixedPrecisionCase(Mesh.of(dp=2), parameters, overflows=(Overflow(axes=("dp",), at=1),))
    assert not plan(case, tensors(case))[0].skipped


def test_the_limit_is_a_share_of_the_first_norm() -> None:
    case = MixedPrecisionCase(Mesh.of(dp=2), clip=0.5)
    given_ = tensors(case)
    assert limit(case) == 0.5 * abs(float(given_["gradient0[0]"].mean()))
    assert limit(dataclasses.replace(case, recipes=MixedPrecisionRecipes(gradient=Recipe("zeros")))) == 1.0


def test_a_rate_of_zero_is_the_identity() -> None:
    recipes = MixedPrecisionRecipes(Recipe("normal"), Recipe("normal"))
    for optimizer in ("sgd", "adamw"):
        case = MixedPrecisionCase(
            Mesh.of(dp=2), (MixedParameter(3),), (Group(0.0, 0.1),), "bf16", optimizer, steps=2, recipes=recipes  # type: ignore[arg-type]
        )  # fmt: skip
        given_ = tensors(case)
        got = expected(case, given_, plan(case, given_))
        for kind in ("parameter", "master"):
            assert torch.equal(got[f"{kind}0[1]"], given_["parameter0"])  # type: ignore[arg-type]


PLAIN = MixedPrecisionCase(Mesh.of(dp=2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "fp64"}, "dtype is 'fp64': expected one of fp32, bf16, fp16"),
        ({"optimizer": "lion"}, "optimizer is 'lion'"),
        ({"invalid": "nothing"}, "invalid is 'nothing'"),
        ({"mesh": Mesh.of(cp=2)}, "expected axes of tp, pp, dp"),
        ({"mesh": Mesh.of(tp=2), "sharded": True}, "and dp where sharded"),
        ({"parameters": (MixedParameter(kind="frozen"),)}, "expected one parameter that trains"),
        ({"groups": (Group(-1.0),)}, "learning rates"),
        ({"clip": -1.0}, r"clip is -1\.0"),
        ({"clip": math.inf}, "clip is inf"),
        ({"betas": (0.9, 1.0)}, "to below 1"),
        ({"load": 1}, "load 1 of 1 steps"),
        ({"reload": -1}, "reload -1 of 1 steps"),
        ({"main_grad": True}, "are for bf16 and fp16"),
        ({"scaling": Scaling(initial=3.0)}, "expected powers of two"),
        ({"scaling": Scaling(initial=1.0)}, "no scale below 1 after 1 steps"),
        ({"overflows": (Overflow(1),)}, "one of 1 steps"),
        ({"overflows": (Overflow(axes=("tp",)),)}, "expected axes of the mesh"),
    ],
)
def test_what_a_case_may_not_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAIN, **changes)


@pytest.mark.parametrize("make", [lambda: MixedParameter(0), lambda: Overflow(-1), lambda: Overflow(value="zero")])  # type: ignore[arg-type]
def test_what_a_part_of_a_case_may_not_be(make: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()
