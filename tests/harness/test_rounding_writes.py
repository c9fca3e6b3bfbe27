"""Disturbed values land where an operation writes: in place, into ``out``, in each of several results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from roundings import FP32, U, X, Y, disturbed
from torch import Tensor

from harness.oracle.rounding import Rounding, spread

IN_PLACE: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "add_": (lambda x: x.add_(Y), lambda x: x + Y),
    "mul_": (lambda x: x.mul_(0.3), lambda x: x * 0.3),
    "addmm_": (lambda x: x.addmm_(Y, Y[:5]), lambda x: torch.addmm(x, Y, Y[:5])),
    "addcmul_": (lambda x: x.addcmul_(Y, Y, value=0.3), lambda x: torch.addcmul(x, Y, Y, value=0.3)),
    "silu_": (lambda x: F.silu(x, inplace=True), F.silu),
    "sigmoid_": (lambda x: x.sigmoid_(), torch.sigmoid),
    "index_add_": (
        lambda x: x.index_add_(0, torch.tensor([1, 1]), Y[:2]),
        lambda x: x.index_add(0, torch.tensor([1, 1]), Y[:2]),
    ),
    "item": (lambda x: x.__setitem__((slice(None), 1), Y[:, 0] * 3), lambda x: _with_column(x, Y[:, 0] * 3)),
    "out": (lambda x: torch.mul(x, Y, out=x), lambda x: x * Y),
    "out of a sum": (lambda x: torch.cumsum(Y, 0, out=x), lambda x: Y.cumsum(0)),
    "out of a fused one": (lambda x: torch.ops.aten.silu.out(Y, out=x), lambda x: F.silu(Y)),
    "list": (lambda x: torch._foreach_mul_([x], [Y]), lambda x: x * Y),
    "list of scalars": (
        lambda x: torch._foreach_addcdiv_([x], [Y], [Y.abs() + 1], [0.3]),
        lambda x: x + 0.3 * Y / (Y.abs() + 1),
    ),
}


def _with_column(x: Tensor, column: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1] = column
    return x


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("engine", ["separate", "together"])
def test_in_place_and_out_forms_write_disturbed_values_where_they_belong(name: str, engine: str) -> None:
    write, functional = IN_PLACE[name]

    def on_a_view() -> dict[str, Tensor]:
        base = torch.zeros(8, 12, dtype=torch.float64)
        view = base[1:7, 1:11:2]
        view.copy_(X)
        write(view)
        if engine == "separate":
            float(base[0, 0] * 3 + X.sum() * 3)  # a number that Python has seen
        return {"base": base, "view": view.clone(), "again": base[1:7, 1:11:2] * 3}

    spreads = spread(on_a_view, FP32, seed=3)
    base, view, again = (spreads[k] for k in ("base", "view", "again"))
    assert base is not None
    assert view is not None
    assert again is not None
    # Not the same bits: strided and dense memory have kernels of their own, and float64 rounds in each.
    assert torch.allclose(view.want, functional(X), rtol=1e-14)
    assert torch.equal(base.residuals[:, 1:7, 1:11:2], view.residuals), "the base holds what the view holds"
    touched = view.deviation != 0
    assert touched.any()
    assert float(base.deviation.sum()) == float(view.deviation.sum()), "and nothing beside the view is disturbed"
    assert (view.deviation < 40 * U * view.want.abs().max()).all()
    assert (again.deviation[touched] > view.deviation[touched]).all(), "what comes later starts from it"


def test_each_result_of_several_is_disturbed() -> None:
    runs = [disturbed(lambda x, i=i: torch.var_mean(x, 0)[i], X) for i in range(2)]
    want = torch.var_mean(X, 0)
    for got, plain in zip(runs, want, strict=True):
        assert ((got - plain).abs().amax(0) > 0.3 * U * plain.abs()).all()
        assert ((got - plain).abs() < 40 * U * plain.abs()).all(), "as far as roundings, and no further"
    conv, weight = X[None], Y.T[:, :, None].contiguous()
    want = torch.ops.aten.convolution_backward(
        torch.ones(1, 5, 5).double(), conv, weight, [5], [1], [0], [1], False, [0], 1, [True] * 3
    )
    for i, plain in enumerate(want):
        got = disturbed(
            lambda g, x, w, i=i: torch.ops.aten.convolution_backward(
                g, x, w, [5], [1], [0], [1], False, [0], 1, [True] * 3
            )[i],
            torch.ones(1, 5, 5).double(),
            conv,
            weight,
        )
        assert ((got - plain).abs().amax(0) > 0.3 * U * plain.abs()).all()
    values, places = X.sort(-1)
    with Rounding(FP32, 0):
        got_values, got_places = X.sort(-1)
    assert torch.equal(got_values, values)
    assert torch.equal(got_places, places)
