"""Parameters that a module holds as parts of one tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from trials import BAD, GOOD, bench, candidate, judge, only_finding

from harness import verify
from harness.held import held
from harness.local import WrongAdapter
from harness.module import PartOf
from reference.linear import LinearCase


def test_a_part_is_read_and_set_and_nothing_else() -> None:
    """Two groups of two queries, a key and a value, of two rows each: the queries are strided in the fused tensor."""
    fused = torch.nn.Parameter(torch.arange(16 * 3.0).view(16, 3))
    before = fused.detach().clone()
    queries = held("q_weight", PartOf(fused, lambda w: w.view(2, 8, 3)[:, :4].reshape(8, 3)))
    rows = [0, 1, 2, 3, 8, 9, 10, 11]
    assert torch.equal(queries.local(), before[rows])
    queries.fill(-torch.ones(8, 3))
    assert torch.equal(fused[rows], -torch.ones(8, 3))
    others = [row for row in range(16) if row not in rows]
    assert torch.equal(fused[others], before[others])
    assert torch.equal(queries.gradient("q_weight.grad", before), before[rows])


def test_a_part_of_a_tensor_that_is_not_contiguous() -> None:
    fused = torch.zeros(2, 3).T
    held("weight", PartOf(fused, lambda w: w[:, 1])).fill(torch.tensor([1.0, 2.0, 3.0]))
    assert fused.tolist() == [[0, 1], [0, 2], [0, 3]]


def test_a_layer_with_a_fused_parameter_holds() -> None:
    with bench("fused.py:Fused") as made:
        assert judge(made, BAD).holds
        assert judge(made, GOOD).holds
    done = verify(candidate("fused.py:Fused"), subjects=["linear"], examples=60, seed=1, max_world=2, save=None)
    (row,) = done.rows
    assert row.result == "held", row


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Overlapping", "parameters weight and bias are made of the same elements of one tensor: correct PartOf"),
        ("WrongShape", "parameter weight has local shape (2, 3); expected (3, 2)"),
        ("Calculating", "PartOf of parameter bias, of a tensor of local shape (3, 2): take calculates; expected it to"),
        ("Repeating", "take takes an element twice; expected it to cut, view, permute or index, and nothing else"),
        ("NoTensor", "take returned NoneType, and no tensor; expected"),
        ("Raising", "PartOf of parameter bias: take raised IndexError("),
    ],
)
def test_a_part_that_does_not_fit_says_nothing_of_the_layer(name: str, message: str) -> None:
    case = BAD if name != "WrongShape" else LinearCase(BAD.mesh, "column", 2, 6, bias=True)
    finding = only_finding(f"fused.py:{name}", case)
    assert finding.kind == "error"
    assert finding.message.startswith("the adapter does not fit on every rank: ")
    assert message in finding.message


def test_parts_of_one_tensor_train_together() -> None:
    case = LinearCase(BAD.mesh, "column", 2, 4, bias=True, weight_requires_grad=False)
    finding = only_finding("fused.py:TrainsApart", case)
    assert finding.kind == "error"
    assert (
        "weight and bias are parts of one tensor, of which the case trains only one: raise NotOffered"
        in finding.message
    )


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("ColumnsSwapped", "output[0]", "output[0] differs from one process"),
        ("DoubledBias", "output[0]", "output[0] differs from one process"),
        ("Writing", None, "the candidate changed parameter bias in place"),
    ],
)
def test_what_a_layer_with_a_fused_parameter_does_wrong_is_found(name: str, tensor: str | None, message: str) -> None:
    finding = only_finding(f"fused.py:{name}")
    assert finding.tensor == tensor
    assert finding.message.startswith(message)


def test_the_gradient_of_a_fused_parameter_must_be_like_it() -> None:
    finding = only_finding("fused.py:OtherGradient")
    assert finding.kind == "mismatch"
    assert "weight.grad is part of a gradient of local shape (2, 2); expected (3, 2)" in finding.message


@pytest.mark.parametrize("shape", [(1, 1), (3, 2)])
@pytest.mark.parametrize("take", [lambda w: w * 2, lambda w: w + 1, lambda w: w[:1] - 1, lambda w: w.flip(0) * -1])
def test_arithmetic_is_refused_however_its_numbers_fall(
    shape: tuple[int, int], take: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with pytest.raises(WrongAdapter, match="take calculates"):
        held("weight", PartOf(torch.zeros(shape), take))


@pytest.mark.parametrize(
    "take", [lambda w: w, lambda w: w.T, lambda w: w[1:], lambda w: w.flip(0)[:, ::2], lambda w: w[[2, 0]]]
)
def test_what_picks_elements_is_taken(take: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = torch.arange(12.0).view(3, 4)
    assert torch.equal(held("weight", PartOf(tensor, take)).local(), take(tensor))
