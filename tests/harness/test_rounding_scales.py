"""How far the rounding model moves the result of each kind of operation, and which results move together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from roundings import EVEN, FP32, U, X, Y, assert_scale, disturbed, largest
from torch import Tensor

from harness.oracle.noise import Noise, amplitude
from harness.oracle.rounding import spread
from reference.dtypes import FORMATS


@pytest.mark.parametrize(
    "function",
    [
        torch.add,
        torch.sub,
        torch.mul,
        torch.div,
        lambda x, y: torch.sqrt(x.abs()),
        lambda x, y: torch.outer(x[0], y[0]),
    ],
    ids=["add", "sub", "mul", "div", "sqrt", "outer"],
)
def test_elementwise_operations_err_relative_to_the_result(function: Callable[..., Tensor]) -> None:
    assert_scale(largest(function, X, Y), function(X, Y).abs())


@pytest.mark.parametrize("function", [torch.exp, torch.tanh, torch.erf, torch.sin], ids=lambda f: f.__name__)
def test_functions_of_the_mathematical_library_err_twice_as_much(function: Callable[..., Tensor]) -> None:
    assert_scale(largest(function, X), 2 * function(X).abs())


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.mm, (X, Y.T)),
        (torch.bmm, (X[None], Y.T[None])),
        (torch.mv, (X, Y[0])),
        (torch.dot, (X[0], Y[0])),
        (torch.addmm, (EVEN[:, :1] - 3, X, Y.T)),
        (lambda c, x, y: torch.addmm(c, x, y, beta=-0.5, alpha=-3), (EVEN[:, :1] - 3, X, Y.T)),
        (torch.sum, (X, 0)),
        (torch.cumsum, (X, 1)),
        (lambda x: F.avg_pool2d(x[None], 2, divisor_override=-4), (X,)),
        (lambda x, y: F.conv1d(x[None], y[None, :, :3].transpose(0, 1)), (X[:1], Y[:1])),
    ],
    ids=[
        "mm",
        "bmm",
        "mv",
        "dot",
        "addmm",
        "negative addmm",
        "sum",
        "cumsum",
        "negative mean",
        "conv1d",
    ],
)
def test_sums_err_relative_to_the_sum_of_magnitudes(function: Callable[..., Tensor], args: tuple[Any, ...]) -> None:
    """In bf16, which is summed in fp32: the scale is that of the terms, whatever the order in which they are added."""
    magnitudes = function(*[a.abs() if isinstance(a, Tensor) else a for a in args]).abs()
    assert_scale(largest(function, *args, fmt=FORMATS["bf16"]), magnitudes)
    assert (magnitudes > 1.5 * function(*args).abs()).any(), "a case without cancellation tells nothing"


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.index_add(x, 0, torch.tensor([1, 1, 4]), y[:3]),
        lambda x, y: torch.index_put(x, [torch.tensor([1, 1, 4])], y[:3], accumulate=True),
    ],
    ids=["index_add", "index_put"],
)
def test_what_is_added_in_turn_errs_more_in_every_format(function: Callable[..., Tensor]) -> None:
    """Two terms meet in one place: each is rounded to bf16 when it is added."""
    scale = function(X.abs(), Y.abs()) + math.sqrt(1 / 3) * function(X, Y).abs()
    assert_scale(largest(function, X, Y, fmt=FORMATS["bf16"]), scale)


def test_the_scale_of_a_contraction_is_blind_to_order() -> None:
    a, b = torch.tensor([[1.0, 1e6, -1e6]]).double(), torch.ones(3, 1).double()
    order = [1, 0, 2]
    for fmt in FORMATS.values():
        one, other = (largest(torch.mm, a[:, p], b, fmt=fmt) for p in ([0, 1, 2], order))
        assert torch.equal(one, other)
        assert (one > 1e6).all()


def test_a_sum_kept_in_fp32_errs_more_with_more_terms_of_one_sign() -> None:
    same, mixed = torch.ones(1200, 1).double(), torch.ones(1200, 1).double()
    mixed[::2] = -1
    for fmt, factor in ((FP32, 1 + math.sqrt(1199 / 3)), (FORMATS["bf16"], 1.0)):
        assert_scale(largest(lambda x: x.sum(0), same, fmt=fmt), factor * 1200 * torch.ones(1))
        assert_scale(largest(lambda x: x.sum(0), mixed, fmt=fmt), 1200 * torch.ones(1))


def test_a_constant_that_the_format_lacks_is_rounded_once() -> None:
    for make in (lambda: torch.full((4,), 0.1, dtype=torch.float64), lambda: X[0, :4].clone().fill_(0.1)):
        tenth = disturbed(make)
        assert (tenth == tenth[:, :1]).all(), "one number, one rounding"
        assert_scale((tenth - 0.1).abs().amax(0) / U, torch.full((4,), 0.1))
    several = disturbed(lambda: torch.linspace(0.1, 1, 4, dtype=torch.float64))
    assert not (several / several[0] == several[:, :1] / several[0, :1]).all(), "several numbers, several roundings"
    assert torch.equal(
        disturbed(lambda: torch.full((4,), 0.1, dtype=torch.float64).floor(), runs=1)[0], torch.zeros(4).double()
    )


def test_a_number_that_fp32_lacks_moves_all_products_together() -> None:
    together = (disturbed(lambda x: x * 0.1, torch.ones(5000).double()) / 0.1 - 1).mean(1) / U
    assert 0.3 < together.square().mean().sqrt() < 1
    alone = (disturbed(lambda x: x * 3, torch.arange(1.0, 5001).double()) / EVEN.new_tensor(range(3, 15001, 3)) - 1) / U
    assert alone.mean(1).square().mean().sqrt() < 0.05


@pytest.mark.parametrize("engine", ["separate", "together"])
def test_numbers_inside_means_and_fused_operations_move_all_results_together(engine: str) -> None:
    def lean(function: Callable[[Tensor], Tensor]) -> float:
        """The part of the error that all elements share, in unit roundoffs."""

        def compute() -> dict[str, Tensor]:
            if engine == "separate":
                float((X * 3).sum())
            return {"y": function(torch.linspace(0.5, 1.5, 3000 * 7).double().reshape(3000, 7))}

        s = spread(compute, FP32, runs=32)["y"]
        assert s is not None
        return float((s.residuals / s.want).flatten(1).mean(1).square().mean().sqrt()) / U

    assert lean(lambda x: x.mean(1)) > 0.3
    assert lean(lambda x: x[:, :4].mean(1)) < 0.05, "a sum over four is a quarter exactly"
    assert lean(lambda x: F.layer_norm(x, (7,)).square().sum(1)) > 0.2
    assert lean(F.gelu) > 0.1
    assert lean(F.silu) < 0.05, "no number is in there but 1"


def test_the_factor_of_a_mean_is_rounded_to_the_format_where_the_kernel_does_so() -> None:
    def lean(reduction: str) -> float:
        def compute() -> dict[str, Tensor]:
            x = torch.linspace(0.5, 1.5, 2100).double().requires_grad_()
            torch.autograd.backward(F.mse_loss(x, -x.detach(), reduction=reduction))
            assert x.grad is not None
            return {"grad": x.grad}

        s = spread(compute, FORMATS["bf16"], runs=32)["grad"]
        assert s is not None
        return float((s.residuals / s.want).mean(1).square().mean().sqrt() / FORMATS["bf16"].unit_roundoff)

    assert lean("mean") > 0.3
    assert lean("sum") < 0.1


def test_products_underflow_and_sums_do_not() -> None:
    """Below fp16's normal range a product is off by up to half the smallest subnormal number, or is lost altogether."""
    fp16 = FORMATS["fp16"]
    values = torch.tensor([1.0, 2.0**-14, 2.0**-20, 2.0**-30, 0.0]).double()
    size = amplitude(values.clone(), fp16)
    assert size.tolist() == [2.0**-11 + 2.0**-25, 2.0**-25 + 2.0**-25, 2.0**-31 + 2.0**-25, 2.0**-41 + 2.0**-30, 0.0]
    assert amplitude(values.clone(), fp16, underflows=False).tolist() == (values * 2.0**-11).tolist()
    products, sums = (
        largest(torch.mul, values, torch.ones(5).double() * 3, fmt=fp16),
        largest(torch.add, values, values, fmt=fp16),
    )
    assert products[2] > 20 * 3 * 2.0**-20
    assert sums[2] <= 2 * 2.0**-20
    assert products[4] == 0
    scaled = largest(lambda x: x * 0.5, values, fmt=fp16)
    assert scaled[0] == 0, "halving is exact"
    assert scaled[2] > 0, "but for underflow"


def test_noise_is_uniform_decided_by_the_seed_and_not_shared_by_neighbours() -> None:
    noise = Noise(7)
    xi = noise.draw((1000, 100))
    assert -1 <= float(xi.min()) < -0.99
    assert 0.99 < float(xi.max()) <= 1
    assert abs(float(xi.mean())) < 0.01
    assert abs(float(xi.square().mean()) - 1 / 3) < 0.01
    again, other = Noise(7), Noise(8)
    assert torch.equal(again.draw((1000, 100)), xi)
    assert not torch.equal(other.draw((1000, 100)), xi)
    second = noise.draw((1000, 100))
    assert not torch.equal(second, xi)
    assert abs(float((xi * second).mean())) < 0.01
    large = Noise(7).draw((1 << 20,))
    assert large.shape == (1 << 20,)
    assert abs(float(large.mean())) < 0.01
