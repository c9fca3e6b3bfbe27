"""What `spread` measures of K disturbed runs, and which references it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from roundings import FP32, U, X, one
from torch import Tensor

from harness.errors import WrongUse
from harness.oracle.rounding import spread
from reference.dtypes import FORMATS


def test_statistics_are_what_they_say() -> None:
    s = one(lambda: X * 3, runs=5)
    assert s.residuals.shape == (5, 6, 5)
    assert torch.equal(s.want, X * 3)
    assert torch.equal(s.deviation, s.residuals.abs().amax(0))
    assert s.floor == pytest.approx(float(s.deviation.square().mean().sqrt()))
    slopes = (s.residuals * s.want).sum((1, 2)) / (s.want * s.want).sum()
    assert s.slope_rms == pytest.approx(float(slopes.square().mean().sqrt()))
    assert 0 < s.slope_rms < U
    assert not s.ambiguous.any()
    assert s.ambiguous.shape == s.want.shape


def test_what_is_absent_empty_zero_or_exact() -> None:
    made = spread(
        lambda: {
            "none": None,
            "empty": X[:0] * 3,
            "zero": X * 0,
            "exact": X[:, 1],
            "number": (X * 3).sum(),
            "no rounding error": torch.zeros(3).double(),
            "integers": X.argmax(0),
        },
        FP32,
        runs=3,
    )
    assert made["none"] is None
    shapes = {"empty": (0, 5), "zero": (6, 5), "exact": (6,), "number": (), "no rounding error": (3,), "integers": (5,)}
    for name, shape in shapes.items():
        s = made[name]
        assert s is not None
        assert s.want.shape == s.deviation.shape == s.ambiguous.shape == shape
        assert s.residuals.shape == (3, *shape)
        assert s.want.dtype is s.deviation.dtype is torch.float64
        assert (s.floor > 0) == (s.slope_rms > 0) == (name == "number")
        assert float(s.deviation.sum()) == 0 or name == "number"


def test_what_is_not_finite_has_its_place_and_no_deviation() -> None:
    x = X.clone()
    x[0, 0], x[1, 1], x[2, 2] = math.inf, -math.inf, math.nan
    s = one(lambda: x * 3)
    assert torch.equal(s.want.isfinite(), x.isfinite())
    assert not s.ambiguous.any()
    assert (s.deviation[~x.isfinite()] == 0).all()
    assert (s.deviation[x.isfinite()] > 0).all()
    assert 0 < s.floor < 1e-5
    assert 0 < s.slope_rms < U


def test_where_rounding_decides_what_is_finite_is_ambiguous() -> None:
    def compute() -> Tensor:
        zero = X[0] * 3 - X[0] * 3
        return torch.stack([1 / zero, zero.sqrt(), (zero + X[0]).sqrt(), X[0] * 3, zero.log()])

    s = one(compute, runs=16)
    assert s.ambiguous[0].all(), "1 / 0 and 1 / almost 0"
    assert s.ambiguous[1].all(), "the root of 0 and of something negative"
    assert not s.ambiguous[2:4].any()
    assert s.ambiguous[4].all()
    assert not (X[0] > 0).all(), "and NaN without rounding is no ambiguity"
    assert (s.deviation[0] == 0).all(), "what is infinite has no deviation"
    assert s.residuals.isfinite().all()
    assert s.deviation.isfinite().all()
    assert 0 < s.floor < 1e-5
    assert 0 < s.slope_rms < 1e-5


@pytest.mark.parametrize("scale", [2.0**1016, 2.0**-960])
def test_no_square_leaves_float64(scale: float) -> None:
    usual, s = (one(lambda x=x: x * 3, fmt=FORMATS["fp64"]) for x in (X, X * scale))  # type: ignore[misc]
    assert s.floor == usual.floor * scale, "the same numbers, times a power of two"
    assert s.slope_rms == usual.slope_rms
    assert 0 < s.slope_rms < 1e-15


def test_names_and_shapes_must_be_the_same_in_every_run() -> None:
    calls: list[int] = []

    def changing(first: Any, second: Any) -> Callable[[], dict[str, Tensor | None]]:
        calls.clear()

        def compute() -> dict[str, Tensor | None]:
            calls.append(1)
            made: dict[str, Tensor | None] = first if len(calls) == 1 else second
            return made

        return compute

    for first, second, message in (
        ({"x": X}, {"x": X[:2]}, r"x is torch.float64 \(6, 5\) and then torch.float64 \(2, 5\)"),
        ({"x": X}, {"x": X.float()}, r"x is torch.float64 \(6, 5\) and then torch.float32 \(6, 5\)"),
        ({"x": X}, {"x": None}, r"x is torch.float64 \(6, 5\) and then None"),
        ({"x": X}, {}, r"x is torch.float64 \(6, 5\) and then missing"),
        ({}, {"y": None}, "y is missing and then None"),
    ):
        with pytest.raises(WrongUse, match=message):
            spread(changing(first, second), FP32)
    assert spread(changing({"x": X}, {"x": X}), FP32)["x"] is not None


def test_values_must_be_the_same_in_every_run() -> None:
    kept, generator = X.clone(), np.random.default_rng(0)
    rest: dict[str, Callable[[], Tensor]] = {
        "writes to what it was given": lambda: kept.add_(1) * 3,
        "draws elsewhere": lambda: X * torch.from_numpy(generator.random(5)),
        "becomes NaN": lambda: kept.mul_(1e200) - kept,
    }
    for name, compute in rest.items():
        with pytest.raises(WrongUse, match="the reference is not the same twice: x differs by up to"):
            one(compute)
        assert name
    same = one(lambda: X.masked_fill(X > 1, math.nan).masked_fill(X < -1, math.inf) * 3)
    assert same.want.isnan().any()
    assert same.want.isinf().any()


def test_results_are_kept_from_later_runs() -> None:
    p = X.clone().requires_grad_()
    p.grad = torch.zeros_like(p)

    def compute() -> Tensor:
        assert p.grad is not None
        p.grad.zero_()
        torch.autograd.backward((p * p * float((p * 3).sum().detach())).sum())
        return p.grad

    s = one(compute, runs=3)
    assert torch.equal(s.want, 2 * X * float((X * 3).sum()))
    assert (s.deviation > 0).all()
    assert not torch.equal(s.residuals[0], s.residuals[1])
    with pytest.raises(WrongUse, match="the reference returns x as float: expected a tensor or None"):
        spread(lambda: {"x": 3.0}, FP32)  # type: ignore[dict-item]


@pytest.mark.parametrize("runs", [0, -1])
def test_at_least_one_run_is_needed(runs: int) -> None:
    with pytest.raises(WrongUse, match=f"runs {runs} must be at least 1"):
        one(lambda: X * 3, runs=runs)
    assert one(lambda: X * 3, runs=1).residuals.shape == (1, 6, 5)
