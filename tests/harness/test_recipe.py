"""Recipes: the same values in every process, representable in the dtype under test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recipe_digest import digest

from reference.dtypes import FORMATS, Format, format_of
from reference.recipe import EXACT_KINDS, INJECTIONS, KINDS, Recipe, fill

BOTH_SIGNS = ("lattice", "normal", "spiky", "cancelling", "near_overflow", "subnormal")
formats = st.sampled_from(list(FORMATS.values()))
recipes = st.builds(Recipe, kind=st.sampled_from(list(KINDS)), seed=st.integers(0, 2**70))
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)

every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
every_kind = pytest.mark.parametrize("kind", KINDS)


def test_a_second_process_makes_the_same_bits() -> None:
    script = Path(__file__).with_name("recipe_digest.py")
    child = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == digest()


def test_reproducers_stay_valid() -> None:
    """These values change only if old reproducers may."""
    made = fill(Recipe(seed=3), "weight", (2, 6), format_of("fp32"), 5)
    assert made.tolist() == [[0, 0, -4, 3, 3, 2], [5, 0, 4, 5, -5, 2]]
    normal = fill(Recipe("normal", seed=3), "bias", (2,), format_of("fp64"))
    assert normal.tolist() == [-1.566597510761762, -0.048299303364352106]


@given(recipes, shapes, formats, st.integers(1, 31))
def test_every_value_is_representable(recipe: Recipe, shape: tuple[int, ...], fmt: Format, limit: int) -> None:
    made = fill(recipe, "input[0]", shape, fmt, limit)
    assert made.dtype == torch.float64
    assert tuple(made.shape) == shape
    assert torch.equal(made.to(fmt.torch_dtype).to(torch.float64), made)
    assert bool(made.isfinite().all())


@given(recipes, st.text(max_size=5), st.text(max_size=5))
def test_only_seed_and_name_decide(recipe: Recipe, name: str, other: str) -> None:
    fmt, normal = format_of("fp64"), Recipe("normal", recipe.seed)
    made = fill(normal, name, (9,), fmt)
    assert (name == other) == torch.equal(made, fill(normal, other, (9,), fmt))
    assert not torch.equal(made, fill(Recipe("normal", recipe.seed + 1), name, (9,), fmt))
    torch.rand(1), np.random.default_rng(0).random()
    assert torch.equal(made, fill(normal, name, (9,), fmt))


@every_format
@every_kind
def test_signs(kind: str, fmt: Format) -> None:
    made = fill(Recipe(kind), "x", (4, 500), fmt, 5)
    assert bool((made < 0).any()) == (kind in BOTH_SIGNS)
    assert bool((made > 0).any()) == (kind != "zeros")


@every_format
@pytest.mark.parametrize("limit", [1, 2, 31])
def test_exact_kinds_are_whole_numbers_up_to_the_limit(fmt: Format, limit: int) -> None:
    def found(kind: str) -> set[float]:
        return set(fill(Recipe(kind), "x", (100, 50), fmt, limit).flatten().tolist())

    wanted = {
        "lattice": set(range(-limit, limit + 1)),
        "zeros": {0.0},
        "constant_per_rank": set(range(1, limit + 1)),
    }
    assert {kind: found(kind) for kind in EXACT_KINDS} == wanted


def test_constant_per_rank_is_constant_along_all_but_the_first_dimension() -> None:
    made = fill(Recipe("constant_per_rank"), "x", (5, 2, 3), format_of("bf16"), 3)
    assert made[:, 0, 0].tolist() == [1.0, 2.0, 3.0, 1.0, 2.0]
    assert torch.equal(made, made[:, :1, :1].expand(5, 2, 3))


@every_format
def test_ranges_of_the_inexact_kinds(fmt: Format) -> None:
    def values(kind: str) -> torch.Tensor:
        return fill(Recipe(kind), "x", (20, 100), fmt)

    assert bool((values("uniform") <= 1).all())
    assert bool((values("near_overflow").abs() >= fmt.largest / 4).all())
    orders = torch.log2(values("spiky").abs())
    assert float(orders.max() - orders.min()) > 10
    subnormal = values("subnormal")
    assert bool((subnormal.abs() < fmt.smallest_normal).all())
    assert bool((subnormal.remainder(fmt.smallest) == 0).all())
    assert bool((subnormal != 0).any())


@every_format
def test_cancelling_halves_nearly_cancel(fmt: Format) -> None:
    made = fill(Recipe("cancelling"), "x", (20, 101), fmt)
    one, other = made[:, :50], made[:, 50:100]
    assert bool(((one + other).abs() <= one.abs() / 4).all())
    assert bool((one + other != 0).any())


@given(recipes, shapes, formats, st.sampled_from(list(INJECTIONS)), st.integers(0, 10**6))
def test_an_injection_replaces_one_element(
    recipe: Recipe, shape: tuple[int, ...], fmt: Format, inject: str, at: int
) -> None:
    plain = fill(recipe, "x", shape, fmt).reshape(-1)
    made = fill(Recipe(recipe.kind, recipe.seed, inject, at), "x", shape, fmt).reshape(-1)
    assert made.shape == plain.shape
    for i in range(len(plain)):
        want = INJECTIONS[inject] if i == at % len(plain) else float(plain[i])
        np.testing.assert_equal(float(made[i]), want)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "gaussian"}, "unknown recipe kind 'gaussian': expected one of lattice, zeros, "),
        ({"inject": "zero"}, "unknown injection 'zero': expected one of inf, -inf, nan"),
        ({"seed": -1}, "seed -1 and position 0 must not be negative"),
        ({"at": -2}, "seed 0 and position -2 must not be negative"),
    ],
)
def test_what_is_unknown_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        Recipe(**wrong)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_formats_are_those_of_torch() -> None:
    for fmt in FORMATS.values():
        info = torch.finfo(fmt.torch_dtype)
        assert fmt.unit_roundoff == info.eps / 2
        assert torch.nextafter(torch.zeros((), dtype=fmt.torch_dtype), torch.ones((), dtype=fmt.torch_dtype)) == (
            fmt.smallest
        )
    with pytest.raises(ValueError, match="unknown dtype 'fp8': expected one of fp32, fp64, bf16, fp16"):
        format_of("fp8")
