"""harness.oracle.expectation: squares of what nearly cancels, as Adam's second moments are of gradients."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from harness.oracle.expectation import expect
from harness.oracle.rounding import disturb
from harness.oracle.statistics import parts, slope
from harness.oracle.within import Limits
from reference.dtypes import FORMATS
from reference.layout import Whole
from reference.mesh import Mesh

BF16 = FORMATS["bf16"]
X = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
#: Each row adds up to a thousandth of its elements.
ROWS = torch.cat([X, -X, 1e-3 * X[:, :1]], 1)


ONES = torch.linspace(1, 2, 8, dtype=torch.float64)


def compute() -> dict[str, torch.Tensor | None]:
    total = functools.reduce(torch.add, ROWS.unbind(1))
    return {"sum": total, "exp_avg_sq": total * total}


def ratios(name: str, squares: bool) -> np.ndarray:
    """What 64 other runs, which are right, show of each element."""
    expected = expect(compute, BF16, given={"rows": ROWS}, squares=lambda one: squares and one == "exp_avg_sq")[name]
    copies = disturb(compute, BF16, runs=64, seed=7).copies[name]
    assert expected is not None
    assert copies is not None
    return np.abs(copies.numpy() - expected.want) / expected.tolerance


def test_right_squares_are_within_their_tolerance_as_their_roots_are() -> None:
    limit = Limits().worst
    assert ratios("sum", squares=False).max() < limit
    assert ratios("exp_avg_sq", squares=False).max() > limit, "without knowing, right ones are refused"
    assert ratios("exp_avg_sq", squares=True).max() < limit


def slopes(squares: bool) -> list[float]:
    """Of right runs of a vector that has one number for a factor, which nearly cancels, for 150 such numbers."""
    found = []
    for row in ROWS[600:750]:

        def of(row: torch.Tensor = row) -> dict[str, torch.Tensor | None]:
            y = functools.reduce(torch.add, row.unbind()) * ONES
            return {"exp_avg_sq": y * y}

        expected = expect(of, BF16, given={"row": row}, squares=lambda name: squares)["exp_avg_sq"]
        copies = disturb(of, BF16, runs=64, seed=7).copies["exp_avg_sq"]
        assert expected is not None
        assert copies is not None
        one = Mesh.of(tp=1)
        found += [slope(parts(expected, Whole(), one, [copy.numpy()])).value for copy in copies]
    return found


def test_the_slope_of_squares_is_that_of_their_roots() -> None:
    assert max(slopes(squares=False)) > Limits().slope, "without knowing, right ones are refused"
    assert max(slopes(squares=True)) < Limits().slope


@pytest.mark.parametrize("size", [1.0, 100.0])
def test_a_square_is_at_its_limit_where_its_root_is(size: float) -> None:
    x = torch.linspace(1, 2, 64, dtype=torch.float64) * size

    def of() -> dict[str, torch.Tensor | None]:
        root = x * 1.5
        return {"root": root, "exp_avg_sq": root.square()}

    found = expect(of, FORMATS["fp32"], given={"x": x}, squares=lambda name: name == "exp_avg_sq")
    root, square = found["root"], found["exp_avg_sq"]
    assert root is not None
    assert square is not None
    far = np.abs((root.want + Limits().worst * root.tolerance) ** 2 - square.want)
    share = far / (Limits().worst * square.tolerance)
    assert 0.3 < share.min() < share.max() < 2, "squaring rounds too"
    doubled = np.abs(square.want) / square.tolerance
    assert doubled.min() > 1e4, "a factor is as far out as ever"
