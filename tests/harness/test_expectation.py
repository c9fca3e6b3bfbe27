"""When the pass that looks for overflow runs, and that attention can be taken apart in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from harness.oracle import expectation
from harness.oracle.expectation import expect
from harness.oracle.overflow import Overflow
from reference.dtypes import FORMATS
from reference.precision import computed_in

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Overflow]:
    made: list[Overflow] = []

    def overflow(*args: Any) -> Overflow:
        made.append(Overflow(*args))
        return made[-1]

    monkeypatch.setattr(expectation, "Overflow", overflow)
    return made


def in_fp16(x: Tensor) -> Tensor:
    with computed_in("fp16"):
        return x * 3.1


REACHES: dict[str, Callable[[Tensor], Tensor]] = {
    "a product": lambda x: x * 3.1,
    "a product with a power of two": lambda x: x * 2,
    "a contraction whose terms cancel": lambda x: x @ torch.cat([x[:1], x[:1] * 0.01 - x[:1]]).T,
    "a sum": lambda x: torch.cat([x, -x]).sum(0),
    "a fused operation": lambda x: F.layer_norm(x.view(1, 48), (48,), x.abs().max().expand(48)),
    "something finite after it": lambda x: (x * 4).tanh(),
}


@pytest.mark.parametrize("name", REACHES)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_it_runs_where_the_largest_number_is_near(dtype: str, name: str, passes: list[Overflow]) -> None:
    fmt = FORMATS[dtype]
    for scale, near in ((fmt.largest / 2, True), (1.0, False)):
        x = X / X.abs().max() * scale
        expect(lambda x=x: {"y": REACHES[name](x)}, fmt)
        assert bool(passes) == near, scale
        passes.clear()


def test_the_format_of_the_operation_counts(passes: list[Overflow]) -> None:
    large = X / X.abs().max() * 60000
    expect(lambda: {"y": large * 3.1}, FORMATS["fp32"])
    assert not passes
    expect(lambda: {"y": in_fp16(large)}, FORMATS["fp32"])
    assert passes


def test_infinities_of_a_mask_are_not_near(passes: list[Overflow]) -> None:
    scores = X.masked_fill(X > 1, -torch.inf)
    expect(lambda: {"y": (scores * 2.5).softmax(-1)}, FORMATS["fp16"])
    assert not passes


def test_fp64_has_no_room_to_tell(passes: list[Overflow]) -> None:
    expect(lambda: {"y": X * 3.1}, FORMATS["fp64"])
    assert passes


def test_what_it_finds_is_free(passes: list[Overflow]) -> None:
    x = torch.full((4,), FORMATS["fp16"].largest, dtype=torch.float64)
    one = expect(lambda: {"y": (torch.stack([x, -x, x * 0.5])).sum(0)}, FORMATS["fp16"])["y"]
    assert one is not None
    assert one.ambiguous.all(), "in another order the sum passes through an infinity"
    assert passes


def test_attention_is_taken_apart_in_every_pass(passes: list[Overflow]) -> None:
    def attention() -> dict[str, Tensor | None]:
        q = X.view(1, 6, 8).clone().requires_grad_()
        y = F.scaled_dot_product_attention(q * 3e4, q, q, is_causal=True)
        y.sum().backward()  # type: ignore[no-untyped-call]
        return {"y": y, "q.grad": q.grad}

    made = expect(attention, FORMATS["fp16"])
    assert passes, "which the scores are made large for"
    assert all(one is not None for one in made.values())


def test_fp64_errs_by_its_smallest_number_below_its_normal_range() -> None:
    """Disturbances are lost there, and another order of two roundings may end one number further."""
    x = torch.tensor([3e-300, 0.0, 1.0], dtype=torch.float64)
    one = expect(lambda: {"y": (x * 1.1) * 1e-17}, FORMATS["fp64"])["y"]
    assert one is not None
    assert one.tolerance[0] >= FORMATS["fp64"].smallest
    assert one.tolerance[1] == 0
    assert one.tolerance[2] < 1e-32
