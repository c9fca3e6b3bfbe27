"""Elements that are one number, computed in one way, round together: many of them are no more evidence than one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.oracle.expectation import expect
from harness.oracle.statistics import Expected, Part, slope
from reference.dtypes import FORMATS

MANY = 400


def lean(expected: Expected, got: torch.Tensor) -> float:
    values = got.to(torch.float64).numpy()
    part = Part(0, values, expected.want, expected.tolerance, expected.residuals, expected.ambiguous, 0.0)
    return slope([part]).value


def thirds(x: torch.Tensor) -> tuple[Expected, torch.Tensor]:
    """A third of each element and a bit: what one process expects, and what bf16 makes of it."""
    found = expect(lambda: {"y": x / 3 + x / 7}, FORMATS["bf16"])["y"]
    assert found is not None
    low = x.to(torch.bfloat16)
    return found, low / 3 + low / 7


def test_equal_elements_that_round_alike_do_not_lean_together() -> None:
    for value in (1.0, 5.0, 11.0, -7.0):
        expected, got = thirds(torch.full((MANY,), value, dtype=torch.float64))
        assert lean(expected, got) < 8, value
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(MANY // 2)
    expected, got = thirds(5 * signs)
    assert lean(expected, got) < 8, "of either sign"
    apart = Expected(
        expected.want * (1 + 1e-15 * np.arange(MANY)), expected.tolerance, expected.residuals, expected.ambiguous
    )
    assert lean(apart, got) < 8, "the reference rounds too"


@pytest.mark.parametrize("factor", [1 + 2**-6, 1 - 2**-6])
def test_different_elements_that_lean_together_are_still_seen(factor: float) -> None:
    x = 1 + torch.rand(MANY, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected, got = thirds(x.to(torch.bfloat16).to(torch.float64))
    assert lean(expected, got) < 8
    assert lean(expected, got * factor) > 16


def test_equal_elements_that_came_out_differently_are_independent() -> None:
    """Each has an error of its own: a lean of all of them is no rounding."""
    expected, right = thirds(torch.full((MANY,), 5.0, dtype=torch.float64))
    noise = torch.randn(MANY, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert lean(expected, right.to(torch.float64) * (1 + 2**-5 + 2**-7 * noise)) > 16
