"""The expected values of a linear layer against torch's autograd."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from drawing import exact_linear_cases
from hypothesis import given

from reference.linear import LinearCase, Tensors, expected, tensors
from reference.mesh import Mesh


def by_autograd(case: LinearCase, given: Tensors) -> dict[str, torch.Tensor | None]:
    """Each replica's layer, run forward and backward on each micro-batch in turn."""
    replicas: list[dict[str, torch.Tensor | None]] = []
    for r in range(case.replicas):
        out: dict[str, torch.Tensor | None] = {}
        weight = given["weight"].clone().requires_grad_(case.weight_requires_grad)
        bias = given["bias"].clone().requires_grad_(case.bias_requires_grad) if case.bias else None
        for m in range(len(case.leading)):
            x = given[f"input[{m}]"][r].clone().requires_grad_(case.input_requires_grad)
            y = F.linear(x, weight, bias)
            if y.requires_grad and case.backward != "never":
                torch.autograd.backward(y, given[f"output[{m}].grad"][r])
            out[f"input[{m}].grad"] = x.grad
            if bias is not None and case.skip_bias_add:
                out[f"output[{m}]"] = F.linear(x, weight).detach()
                out[f"output_bias[{m}]"] = bias.detach()
            else:
                out[f"output[{m}]"] = y.detach()
        out["weight.grad"] = weight.grad
        if bias is not None:
            out["bias.grad"] = bias.grad
        replicas.append(out)
    stacked: dict[str, torch.Tensor | None] = {}
    for name in replicas[0]:
        parts = [part for replica in replicas if (part := replica[name]) is not None]
        stacked[name] = torch.stack(parts) if parts else None
    return stacked


@given(exact_linear_cases)
def test_expected_is_what_autograd_computes(case: LinearCase) -> None:
    made = tensors(case)
    got, want = expected(case, made), by_autograd(case, made)
    assert set(got) == set(want)
    for name, value in got.items():
        other = want[name]
        assert (value is None) == (other is None), name
        if value is not None and other is not None:
            assert value.dtype == torch.float64
            assert torch.equal(value, other), name


@given(exact_linear_cases)
def test_micro_batches_sum(case: LinearCase) -> None:
    made = tensors(case)
    trained = dataclasses.replace(case, weight_requires_grad=True, bias_requires_grad=True, backward="immediate")
    whole = expected(trained, made)
    for name in ("weight.grad", "bias.grad"):
        if name not in whole:
            continue
        total = torch.zeros(())
        for m, dims in enumerate(case.leading):
            alone = dataclasses.replace(trained, leading=(dims,))
            part = {"input[0]": made[f"input[{m}]"], "output[0].grad": made[f"output[{m}].grad"]}
            single = expected(alone, {**made, **part})[name]
            assert single is not None
            total = total + single
        assert torch.equal(total, whole[name])  # type: ignore[arg-type]


@given(exact_linear_cases)
def test_replicas_have_data_of_their_own_and_share_the_parameters(case: LinearCase) -> None:
    made = tensors(case)
    assert made["weight"].shape == (case.out_features, case.in_features)
    assert ("bias" in made) == case.bias
    for m, dims in enumerate(case.leading):
        assert made[f"input[{m}]"].shape == (case.replicas, *dims, case.in_features)
        assert made[f"output[{m}].grad"].shape == (case.replicas, *dims, case.out_features)
    assert case.replicas * case.parallel_size == case.mesh.size
    sizes = dict(case.mesh.axes)
    assert case.parallel_size == sizes.pop(case.axis)
    assert case.replica_axes == tuple(sizes)


def test_replicas_and_micro_batches_differ() -> None:
    made = tensors(LinearCase(Mesh.of(tp=2, dp=2), "column", 8, 8, ((4,), (4,))))
    inputs = [made[f"input[{m}]"][r] for m in range(2) for r in range(2)]
    assert not any(torch.equal(a, b) for i, a in enumerate(inputs) for b in inputs[:i])


@pytest.mark.parametrize("frozen", ["input", "weight", "bias"])
def test_what_is_frozen_has_no_gradient(frozen: str) -> None:
    plain = LinearCase(Mesh.of(tp=2), "row", 4, 3, ((2,), (1,)), bias=True)
    flags: dict[str, Any] = {f"{frozen}_requires_grad": False}
    case = dataclasses.replace(plain, **flags)
    made = tensors(case)
    missing = {name for name, value in expected(case, made).items() if value is None}
    assert missing == ({"input[0].grad", "input[1].grad"} if frozen == "input" else {f"{frozen}.grad"})
    assert case.trained == {"input", "weight", "bias"} - {frozen}
    never = dataclasses.replace(plain, backward="never")
    assert never.trained == frozenset()
    assert [name for name, value in expected(never, made).items() if value is not None] == ["output[0]", "output[1]"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "fp8"}, "unknown dtype 'fp8'"),
        ({"axis": "dp"}, "the layer's axis 'dp' is not in the mesh tp=2"),
        ({"in_features": 0}, "in_features 0 and out_features 3 must be at least 1"),
        ({"out_features": -1}, "in_features 4 and out_features -1 must be at least 1"),
        ({"leading": ()}, "leading (): expected one or more micro-batches"),
        ({"leading": ((),)}, "leading ((),): expected one or more micro-batches"),
        ({"leading": ((2, 0),)}, "leading ((2, 0),): expected one or more micro-batches of dimensions of at least 1"),
        ({"mesh": Mesh.of(dp=2), "axis": "dp"}, "axis 'dp' is not the default group"),
        ({"sequence_parallel": True, "gather_output": True}, "sequence_parallel goes with neither gather_output"),
        ({"sequence_parallel": True, "input_is_parallel": False}, "sequence_parallel goes with neither gather_output"),
        ({"backward": "later"}, "backward is 'later': expected one of immediate, delayed, reversed, never"),
        ({"skip_bias_add": True}, "skip_bias_add goes only with bias"),
    ],
)
def test_options_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    plain = LinearCase(Mesh.of(tp=2), "column", 4, 3)
    with pytest.raises(ValueError, match=r"\S") as caught:
        dataclasses.replace(plain, **changes)
    assert message in str(caught.value)
