"""A case that is only a little beyond its tolerance is judged again, with a tolerance that scatters less."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from harness.bench import Bench
from harness.oracle.deviation import RUNS
from harness.oracle.expectation import CAREFUL
from harness.oracle.rounding import spread
from harness.oracle.statistics import Expected
from harness.properties import property_of
from harness.properties.base import Property
from reference.dtypes import FORMATS
from reference.linear import LinearCase, LinearRecipes
from reference.mesh import Mesh
from reference.recipe import Recipe

LINEAR = property_of("linear")
NORMAL = [Recipe("normal", seed) for seed in range(4)]
CASE = LinearCase(Mesh.of(tp=2), "row", 16, 8, ((6,),), bias=True, recipes=LinearRecipes(*NORMAL))
EXACT = dataclasses.replace(CASE, recipes=LinearRecipes())


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench("builtin") as made:
        yield made


def smaller(want: dict[str, Any], factor: float) -> dict[str, Any]:
    """As if the disturbances had happened to be smaller."""
    return {
        name: dataclasses.replace(one, tolerance=one.tolerance / factor, residuals=one.residuals / factor)
        if isinstance(one, Expected)
        else one
        for name, one in want.items()
    }


def looking(first: float, second: float, seen: list[str]) -> Property:
    """The property with tolerances divided by ``first``, and by ``second`` at the second look."""

    def careful(case: LinearCase) -> dict[str, Any]:
        seen.append("careful")
        return smaller(LINEAR.careful(case), second)

    return dataclasses.replace(LINEAR, expected=lambda case: smaller(LINEAR.expected(case), first), careful=careful)


def test_right_code_needs_no_second_look(bench: Bench) -> None:
    seen: list[str] = []
    assert bench.once(looking(1, 1, seen), CASE).verdict.holds
    assert not seen


def test_what_was_scatter_holds_at_the_second_look(bench: Bench) -> None:
    seen: list[str] = []
    first = bench.once(dataclasses.replace(looking(20, 1, seen), careful=lambda case: None), CASE).verdict
    assert first.kind == "mismatch"
    assert 16 < max(first.facts["worst"], first.facts["slope"]) < 100
    second = bench.once(looking(20, 1, seen), CASE).verdict
    assert second.holds
    assert seen == ["careful"]
    assert second.facts["worst"] < 16, "and its statistics are those of the second look"


def test_what_stays_beyond_is_condemned(bench: Bench) -> None:
    seen: list[str] = []
    assert bench.once(looking(20, 20, seen), CASE).verdict.kind == "mismatch"
    assert seen == ["careful"]


def test_what_is_far_beyond_needs_no_second_look(bench: Bench) -> None:
    seen: list[str] = []
    assert bench.once(looking(1e4, 1, seen), CASE).verdict.kind == "mismatch"
    assert not seen


def test_what_must_be_exact_is_looked_at_once(bench: Bench) -> None:
    assert LINEAR.careful(EXACT) is None

    def other(case: LinearCase) -> dict[str, Any]:
        return {name: None if one is None else one + 1 for name, one in LINEAR.expected(case).items()}

    assert bench.once(dataclasses.replace(LINEAR, expected=other), EXACT).verdict.kind == "mismatch"


def test_the_second_look_estimates_the_same_with_less_scatter() -> None:
    """In the mean over elements alike; of an element, half as far from what 512 runs say."""
    x = torch.randn(40, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    few, more, most = (spread(lambda: {"y": x * x}, FORMATS["fp32"], runs=runs)["y"] for runs in (RUNS, CAREFUL, 512))
    assert few is not None
    assert more is not None
    assert most is not None
    batches = more.residuals.abs().view(CAREFUL // RUNS, RUNS, *x.shape)
    assert torch.equal(more.deviation, batches.amax(1).mean(0))
    ratio_few, ratio_more = few.deviation / most.deviation, more.deviation / most.deviation
    assert 0.97 < float(ratio_more.mean()) < 1.03
    assert 0.97 < float(ratio_few.mean()) < 1.03
    assert float(ratio_more.std()) < 0.6 * float(ratio_few.std())
