"""The reference of data parallelism against autograd on the whole batch, its exactness, and what a case may not be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import strategies.data_parallel
from harness.network import Network
from reference.codec import decode, encode
from reference.data_parallel import DataParallelCase, DataParallelRecipes, Layer, frozen, idle, sums, tensors, trained
from reference.data_parallel_gradients import expected
from reference.data_parallel_tokens import token_weights, valid_tokens
from reference.data_parallel_traffic import needed, synchronised
from reference.lattice import lattice_limits
from reference.mesh import Mesh
from reference.recipe import EXACT_KINDS, Recipe
from strategies.scope import Scope

FULL = Scope(max_world=8, features=frozenset(strategies.data_parallel.FEATURES))
CASES = strategies.data_parallel.cases(FULL).filter(lambda case: case.invalid is None)
DP = Mesh.of(dp=2)


def of_one_process(case: DataParallelCase) -> dict[str, torch.Tensor | None]:
    """Gradients and losses by autograd through the network that candidates get, in float64."""
    wide = dataclasses.replace(case, dtype="fp64", reduce_dtype="same", main_grad=False)
    given_ = tensors(case)
    found: dict[str, torch.Tensor | None] = {}
    for step in range(case.steps):
        weights = token_weights(case, step)
        losses, grads = [], []
        for replica in range(case.replicas):
            network = Network(wide, given_)
            total = torch.zeros((), dtype=torch.float64)
            for m in range(case.micro_batches):
                for c in range(case.parallel_size):
                    x = given_[f"input[{step * case.micro_batches + m}]"][replica, c]
                    total = (
                        total + (network(x, case.used(c, step * case.micro_batches + m)) * weights[m, replica, c]).sum()
                    )
            total.backward()
            losses.append(total.detach())
            named = {f"{what}{i}": p for i in range(len(case.layers)) for what, p in network.parameters_of(i).items()}
            grads.append({name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in named.items()})
        found[f"loss[{step}]"] = torch.stack(losses)
        for name in trained(case):
            found[f"{name}[{step}].grad"] = torch.stack([one[name] for one in grads])
        for name in frozen(case):
            found[f"{name}[{step}].grad"] = None
    return found


@settings(max_examples=100)
@given(CASES)
def test_gradients_and_losses_are_autograds_on_the_whole_batch(case: DataParallelCase) -> None:
    """Both sum the same terms: they differ by at most twice the number of operations times u, relative to the sum of
    their magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2)."""
    given_ = tensors(case)
    want, got = of_one_process(case), expected(case, given_)
    magnitudes = expected(case, {name: value.abs() for name, value in given_.items()})
    tokens = case.micro_batches * case.parallel_size * case.samples * case.length
    operations = tokens * (case.features + 2) * sum(layer.out for layer in case.layers) + 8
    assert set(got) == set(want)
    for name, value in want.items():
        ours, largest = got[name], magnitudes[name]
        if value is None or ours is None or largest is None:
            assert value is ours, name
        elif case.exact:
            assert torch.equal(ours, value), name
        else:
            assert bool(((ours - value).abs() <= 2 * operations * 2.0**-53 * largest).all()), name


@settings(max_examples=100)
@given(CASES)
def test_what_is_exact_fits_every_format_on_the_way(case: DataParallelCase) -> None:
    if not case.exact:
        return
    lattice_limits(sums(case))  # raises where it does not fit
    for name, value in expected(case, tensors(case)).items():
        if value is not None:
            fmt = case.loss_format if name.startswith("loss") else case.kept
            assert torch.equal(value.to(fmt.torch_dtype).to(torch.float64), value), name
            narrow = value if name.startswith("loss") else value.to(case.reduced_in.torch_dtype).to(torch.float64)
            assert torch.equal(narrow, value), name


@given(CASES)
def test_a_case_survives_its_json(case: DataParallelCase) -> None:
    assert decode(DataParallelCase, encode(case)) == case


def test_rounding_and_odd_divisors_are_not_exact() -> None:
    plain = DataParallelCase(DP)
    assert plain.exact
    assert not dataclasses.replace(plain, recipes=DataParallelRecipes(input=Recipe("normal"))).exact
    assert not dataclasses.replace(plain, mesh=Mesh.of(dp=3)).exact
    assert dataclasses.replace(plain, mesh=Mesh.of(dp=3), reduction="sum").exact
    assert dataclasses.replace(plain, loss="token_mean").exact, "two tokens"
    assert not dataclasses.replace(plain, loss="token_mean", length=3, counts=(3,)).exact, "six tokens"
    assert dataclasses.replace(plain, loss="token_mean", counts=(0,)).exact, "none"
    assert dataclasses.replace(plain, loss="sample_mean", length=2, counts=(2, 1)).exact
    assert not dataclasses.replace(plain, loss="sample_mean", length=3, counts=(3, 1)).exact
    assert {recipe.kind for recipe in (plain.recipes.input, plain.recipes.parameter)} <= set(EXACT_KINDS)


def test_counts_and_empty_ranks_say_which_tokens_are_valid() -> None:
    case = DataParallelCase(DP, micro_batches=2, samples=1, length=3, counts=(1, 3, 2))
    tokens = valid_tokens(case, 0)
    assert tokens.shape == (2, 1, 2, 1, 3)
    assert tokens.sum(-1).flatten().tolist() == [1, 3, 2, 1], "ranks first, then micro-batches, round and round"
    assert valid_tokens(dataclasses.replace(case, empty=(1,)), 0).sum(-1).flatten().tolist() == [1, 0, 2, 0]
    assert tokens[0, 0, 0, 0].tolist() == [True, False, False], "the first ones"


@pytest.mark.parametrize("loss", ["token_mean", "sample_mean"])
def test_the_weights_of_a_mean_add_up_to_one_or_to_nothing(loss: Any) -> None:
    case = DataParallelCase(Mesh.of(dp=2, tp=2), micro_batches=2, samples=2, length=3, counts=(1, 3, 0), loss=loss)
    assert token_weights(case, 0).sum((0, 2, 3, 4)).tolist() == [pytest.approx(1)] * 2
    assert not token_weights(dataclasses.replace(case, counts=(0,)), 0).any()


def test_who_uses_what() -> None:
    layers = (Layer(2), Layer(2, "tied"), Layer(1, "frozen"), Layer(3, "unused"), Layer(1))
    case = DataParallelCase(DP, layers, rotated=True, skipped=((4, 0, 0), (9, 1, 5), (1, 2, 0)))
    assert case.used(0, 0) == (0, 2), "1 and 4 are left out, 3 is unused"
    assert case.used(1, 0) == (1, 2, 0), "and rank 1 starts one later"
    assert idle(case) == ["weight3", "bias3", "weight4", "bias4"]
    assert frozen(case) == ["weight2", "bias2"]
    assert "weight1" not in trained(case)
    assert idle(dataclasses.replace(case, skipped=())) == ["weight3", "bias3"]


def test_what_is_used_may_change_from_step_to_step() -> None:
    case = DataParallelCase(
        DP, (Layer(), Layer(bias=False)), micro_batches=2, steps=2, skipped=((1, -1, 2), (1, -1, 3))
    )
    assert [[case.used(c, k) for k in range(4)] for c in range(2)] == [[(0, 1), (0, 1), (0,), (0,)]] * 2
    assert (idle(case), idle(case, 0), idle(case, 1)) == ([], [], ["weight1"])
    assert idle(dataclasses.replace(case, skipped=case.skipped[:1]), 1) == []


def test_every_trained_element_is_reduced_at_each_synchronisation() -> None:
    case = DataParallelCase(DP, (Layer(2), Layer(3, "frozen"), Layer(1, "unused")), 2, micro_batches=2, steps=2)
    (first, second) = needed(case)
    assert first.elements == 2 * 2 + 2 + 2 + 1
    assert [first.micro_batch, second.micro_batch] == [1, 3] == synchronised(case)
    assert synchronised(dataclasses.replace(case, sync="every")) == [0, 1, 2, 3]
    assert {one.dtype for one in needed(dataclasses.replace(case, reduce_dtype="bf16"))} == {"bfloat16"}
    assert needed(dataclasses.replace(case, mesh=Mesh.of(dp=1, tp=2))) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axis": "tp"}, "the axis 'tp' is not in the mesh"),
        ({"bucket": 0}, "bucket is 0: expected at least 1"),
        ({"steps": 0}, "steps is 0"),
        ({"loss": "mean"}, "loss is 'mean': expected one of token_mean"),
        ({"reduction": "max"}, "reduction is 'max'"),
        ({"counts": (2,)}, "counts .* expected one or more from 0 to the length 1"),
        ({"counts": ()}, "counts"),
        ({"layers": (Layer(1, "frozen"),)}, "the first layer must be one that trains"),
        ({"layers": (Layer(2), Layer(1, "tied"))}, "a tied layer has the first layer's 2 features"),
        ({"skipped": ((0, 0, 0),)}, "not the first layer"),
        ({"skipped": ((1, 0, 0),)}, "not the first layer"),
        ({"dtype": "fp64", "reduce_dtype": "fp32"}, "gradients in fp64 are not reduced in fp32"),
        ({"main_grad": True}, "main_grad is for bf16 and fp16"),
        ({"mesh": Mesh.of(dp=1), "invalid": "shape"}, "one rank cannot differ"),
        ({"layers": (Layer(1, bias=False),), "invalid": "order"}, "one parameter has no other order"),
    ],
)
def test_what_is_no_case_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DataParallelCase(DP), **changes)


@pytest.mark.parametrize(("out", "kind"), [(0, "own"), (1, "other")])
def test_what_is_no_layer_is_refused(out: int, kind: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        Layer(out, kind)
