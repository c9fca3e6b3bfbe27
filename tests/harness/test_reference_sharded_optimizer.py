"""The reference of sharded optimizers against torch.optim in float64, its exactness, and what a case may not be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import strategies.sharded_optimizer
from reference.codec import decode, encode
from reference.lattice import lattice_limits
from reference.mesh import Mesh
from reference.recipe import Recipe
from reference.sharded_optimizer import (
    Parameter,
    ShardedOptimizerCase,
    ShardedOptimizerRecipes,
    expected,
    local_gradients,
    sums,
    tensors,
)
from reference.sharded_optimizer_traffic import needed
from strategies.scope import Scope

FULL = Scope(max_world=8, features=frozenset(strategies.sharded_optimizer.FEATURES))
CASES = strategies.sharded_optimizer.cases(FULL).filter(lambda case: case.invalid is None)
DP = Mesh.of(dp=2)
_KEYS = {"momentum": "momentum_buffer"}


def of_torch(case: ShardedOptimizerCase) -> dict[str, torch.Tensor]:
    """Parameters and state by torch.optim, in float64, one replica after the other."""
    given_, found = tensors(case), dict[str, list[torch.Tensor]]()
    for replica in range(case.groups):
        values = [torch.nn.Parameter(given_[f"parameter{i}"].clone()) for i in range(len(case.parameters))]
        trained = [values[i] for i in case.trained]
        optimizer: torch.optim.Optimizer
        if case.optimizer == "adamw":
            optimizer = torch.optim.AdamW(trained, case.lr, case.betas, case.eps, case.weight_decay)
        else:
            optimizer = torch.optim.SGD(trained, case.lr, case.momentum, weight_decay=case.weight_decay)
        for step in range(case.steps):
            for i in case.trained:
                own = local_gradients(case, given_, i, step)[replica]
                values[i].grad = own.mean(0) if case.reduction == "average" else own.sum(0)
            optimizer.step()
            for i, value in enumerate(values):
                found.setdefault(f"parameter{i}[{step}]", []).append(value.detach().clone())
                for kind in case.states if i in case.trained else ():
                    kept = optimizer.state[value][_KEYS.get(kind, kind)]
                    found.setdefault(f"{kind}{i}[{step}]", []).append(kept.reshape(-1).clone())
    return {name: torch.stack(values) for name, values in found.items()}


@settings(max_examples=150)
@given(CASES)
def test_steps_are_those_of_torch(case: ShardedOptimizerCase) -> None:
    """Both are in float64; they differ in the order of operations. A step of AdamW is ill-conditioned where a gradient
    is small next to the terms that cancel in it, and is then at most lr."""
    got, want = expected(case, tensors(case)), of_torch(case)
    assert set(got) == set(want)
    for name, value in got.items():
        assert value is not None
        if case.exact:
            assert torch.equal(value, want[name]), name
        else:
            torch.testing.assert_close(value, want[name], rtol=1e-9, atol=1e-7, msg=name)


@settings(max_examples=100)
@given(CASES)
def test_what_is_exact_fits_every_format_on_the_way(case: ShardedOptimizerCase) -> None:
    if not case.exact:
        return
    lattice_limits(sums(case))  # raises where it does not fit
    for name, value in expected(case, tensors(case)).items():
        assert value is not None
        i = int(name.removeprefix("parameter").partition("[")[0])
        assert torch.equal(value.to(case.format_of(i).torch_dtype).to(torch.float64), value), name


@given(CASES)
def test_a_case_survives_its_json(case: ShardedOptimizerCase) -> None:
    assert decode(ShardedOptimizerCase, encode(case)) == case


def test_what_rounds_is_not_exact() -> None:
    plain = ShardedOptimizerCase(DP)
    assert plain.exact
    for changes in (
        {"mesh": Mesh.of(dp=3)},
        {"optimizer": "adamw"},
        {"momentum": 0.5},
        {"weight_decay": 0.5},
        {"lr": 0.1},
        {"recipes": ShardedOptimizerRecipes(gradient=Recipe("normal"))},
    ):
        assert not dataclasses.replace(plain, **changes).exact, changes  # type: ignore[arg-type]
    assert dataclasses.replace(plain, mesh=Mesh.of(dp=3), reduction="sum").exact
    assert dataclasses.replace(plain, lr=0.25).exact


def test_who_has_gradients() -> None:
    case = ShardedOptimizerCase(
        Mesh.of(dp=3), tuple(Parameter(kind=k) for k in ("trained", "some", "none", "first")), steps=2
    )
    assert [[case.has_gradient(i, c, 0) for c in range(3)] for i in range(4)] == [
        [True] * 3,
        [True, False, True],
        [False] * 3,
        [True] * 3,
    ]
    assert not case.has_gradient(3, 0, 1)
    given_ = tensors(case)
    assert "gradient2[0]" not in given_
    assert not local_gradients(case, given_, 1, 0)[:, 1].any()
    assert not local_gradients(case, given_, 2, 0).any()
    assert local_gradients(case, given_, 3, 0).any()
    assert "gradient3[1]" not in given_
    assert not local_gradients(case, given_, 3, 1).any()


def test_a_state_that_moves_has_one_replica_and_gradients_for_each_axis() -> None:
    case = ShardedOptimizerCase(Mesh.of(dp=2, tp=3), steps=2, load=1, load_axis="tp")
    assert (case.groups, case.apart) == (1, ())
    assert [tensors(case)[f"gradient0[{step}]"].shape for step in range(2)] == [(1, 2, 1), (1, 3, 1)]
    assert dataclasses.replace(case, load_axis=None).groups == 3


def test_each_dtype_is_reduced_and_gathered_once_a_step() -> None:
    low = Parameter((3,)), Parameter((2,), fp32=True), Parameter((4,), kind="frozen"), Parameter(())
    case = ShardedOptimizerCase(DP, low, dtype="bf16", reduce_dtype="fp32", steps=2)
    first = [(t.operation, t.elements, t.least, t.dtype) for t in needed(case) if t.micro_batch == 0]
    assert first == [
        ("reduce_scatter", 4, 4, "float32"),
        ("all_gather", 2, None, "bfloat16"),
        ("reduce_scatter", 2, 2, "float32"),
        ("all_gather", 1, None, "float32"),
    ]
    odd = dataclasses.replace(case, parameters=(Parameter((3,)),), reduce_dtype="same")
    assert [(t.elements, t.least, t.dtype) for t in needed(odd)[:2]] == [(4, 3, "bfloat16"), (2, 0, "bfloat16")]
    assert needed(dataclasses.replace(case, mesh=Mesh.of(dp=1))) == ()
    moved = dataclasses.replace(case, mesh=Mesh.of(dp=2, tp=1), load=1, load_axis="tp")
    assert {t.micro_batch for t in needed(moved)} == {0}, "the second step is on one rank"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axis": "tp"}, "the axis 'tp' is not in the mesh"),
        ({"load": 1, "steps": 2, "load_axis": "tp"}, "the axis 'tp' is not in the mesh"),
        ({"optimizer": "adam"}, "optimizer is 'adam': expected one of sgd, adamw"),
        ({"reduction": "max"}, "reduction is 'max'"),
        ({"parameters": ()}, "no parameter trains"),
        ({"parameters": (Parameter(kind="frozen"),)}, "no parameter trains"),
        ({"steps": 0}, "expected 0, or less than the steps"),
        ({"load": 1}, "load 1 of 1 steps"),
        ({"load": 1, "steps": 2, "load_axis": "dp"}, "expected another axis than 'dp'"),
        ({"mesh": Mesh.of(dp=2, tp=1), "load_axis": "tp"}, "and a load"),
        ({"master": True}, "master and reduce_dtype='fp32' are for bf16 and fp16"),
        ({"optimizer": "adamw", "dtype": "fp16"}, "AdamW in fp16 is expected with master"),
        ({"lr": 0.0}, "expected lr and eps above 0"),
        ({"momentum": 1.0}, "momentum from 0 to below 1"),
        ({"invalid": "state_shape"}, "expected a load"),
        ({"mesh": Mesh.of(dp=1), "invalid": "shape"}, "one rank cannot differ"),
        ({"invalid": "order"}, "expected parameters that can be told apart"),
        ({"steps": 2, "load": 1, "dtype": "fp16", "invalid": "state_optimizer"}, "expected master"),
    ],
)
def test_what_is_no_case_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ShardedOptimizerCase(DP), **changes)


@pytest.mark.parametrize(("shape", "kind"), [((0,), "trained"), ((1,), "other")])
def test_what_is_no_parameter_is_refused(shape: tuple[int, ...], kind: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        Parameter(shape, kind=kind)
