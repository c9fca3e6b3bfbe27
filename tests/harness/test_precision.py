"""What a reference says about precision, and how the rounding model listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from harness.oracle.rounding import Spread, spread
from reference.dtypes import FORMATS
from reference.precision import computed_in, current, gradient_rounded_to, rounded_to

BF16, FP32 = FORMATS["bf16"], FORMATS["fp32"]
#: Neither so small that fp16 underflows, nor powers of two.
X = torch.rand(6, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.6
W = torch.randn(40, 40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def format_of(s: Spread | None) -> str:
    """The format whose unit roundoff is nearest to the largest deviation relative to its element."""
    assert s is not None
    seen = float((s.deviation / s.want.abs()).max().log2())
    return min(FORMATS, key=lambda name: abs(seen + FORMATS[name].precision))


def of(compute: Callable[[], Tensor]) -> str:
    return format_of(spread(lambda: {"x": compute()}, BF16, runs=32)["x"])


def exact(s: Spread | None) -> bool:
    assert s is not None
    return s.floor == 0


def test_a_block_names_the_format_of_its_operations() -> None:
    assert of(lambda: X * X) == "bf16"
    with computed_in("fp32"):
        assert of(lambda: X * X) == "fp32"

    def within(name: str) -> Tensor:
        with computed_in(name):
            return X * X

    assert [of(lambda n=n: within(n)) for n in ("fp32", "fp16", "bf16", "fp64")] == ["fp32", "fp16", "bf16", "fp64"]  # type: ignore[misc]


def test_blocks_nest_and_end() -> None:
    def compute() -> dict[str, Tensor]:
        out = {"before": X * X}
        with computed_in("fp32"):
            out["outer"] = X * X
            with computed_in("fp16"):
                out["inner"] = X * X
            out["outer again"] = X * X
        out["after"] = X * X
        return out

    made = spread(compute, BF16, runs=32)
    assert {name: format_of(s) for name, s in made.items()} == {
        "before": "bf16",
        "outer": "fp32",
        "inner": "fp16",
        "outer again": "fp32",
        "after": "bf16",
    }
    with pytest.raises(RuntimeError, match="mine"), computed_in("fp32"):
        raise RuntimeError("mine")
    assert current() is None


def test_values_are_not_changed() -> None:
    def compute(say: bool) -> list[Tensor]:
        x = X.clone().requires_grad_()
        if say:
            with computed_in("bf16"):
                y = gradient_rounded_to("fp16")(rounded_to("bf16")(x).softmax(-1) @ W)
        else:
            y = x.softmax(-1) @ W
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        return [y.detach(), grad]

    for said, silent in zip(compute(True), compute(False), strict=True):
        assert torch.equal(said, silent)
    stored = rounded_to("bf16")(X)
    assert torch.equal(stored, X)
    assert stored.data_ptr() != X.data_ptr()


def gradient(forward: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    x = X.clone().requires_grad_()
    y = forward(x)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return {"y": y.detach(), "grad": grad}


def test_backward_counts_as_computed_where_forward_was() -> None:
    def fp32_then_case(x: Tensor) -> Tensor:
        with computed_in("fp32"):
            return x * x

    def case_then_fp32(x: Tensor) -> Tensor:
        y = x * x
        with computed_in("fp32"):
            torch.ones(3) * 3  # an operation that autograd does not record must not be taken for the one before
            return y * 1.0

    made = spread(lambda: gradient(fp32_then_case), BF16, runs=32)
    assert (format_of(made["y"]), format_of(made["grad"])) == ("fp32", "fp32")
    made = spread(lambda: gradient(case_then_fp32), BF16, runs=32)
    assert (format_of(made["y"]), format_of(made["grad"])) == ("bf16", "bf16")
    made = spread(lambda: gradient(lambda x: x * x), BF16, runs=32)
    assert (format_of(made["y"]), format_of(made["grad"])) == ("bf16", "bf16")


def test_fused_operations_and_their_backward_follow_the_block() -> None:
    def softmax(x: Tensor) -> Tensor:
        with computed_in("fp32"):
            return x.softmax(-1)

    def compute(forward: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        x = X.clone().requires_grad_()
        y = forward(x)
        (grad,) = torch.autograd.grad(y, x, X.flip(0))
        return {"y": y.detach(), "grad": grad}

    for runs_apart in (False, True):
        said, silent = (
            spread(lambda f=f, a=runs_apart: {**compute(f), "read": torch.tensor(_read(a))}, BF16)  # type: ignore[misc]
            for f in (softmax, lambda x: x.softmax(-1))
        )
        for name in ("y", "grad"):
            one, other = said[name], silent[name]
            assert one is not None
            assert other is not None
            # The logarithm of the sum is held in fp32 either way, and its rounding moves a row by more than one unit.
            assert 2**-18 < one.floor / other.floor < 2**-13


def _read(number: bool) -> float:
    return float((X * 3).sum()) if number else 0.0


def test_a_block_around_backward_holds_for_what_has_none_of_its_own() -> None:
    def compute() -> dict[str, Tensor]:
        x = X.clone().requires_grad_()
        with computed_in("fp16"):
            y = x * x
        z = y * X
        with computed_in("fp32"):
            by_z, by_x = torch.autograd.grad(z, [y, x], torch.ones_like(z))
        return {"of z": by_z, "of x": by_x}

    made = spread(compute, BF16, runs=32)
    assert (format_of(made["of z"]), format_of(made["of x"])) == ("fp32", "fp16")


def test_a_block_in_a_written_backward_holds_there() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            with computed_in("fp16"):
                return grad * x * 2

    def compute() -> dict[str, Tensor]:
        def forward(x: Tensor) -> Tensor:
            with computed_in("fp32"):
                made: Tensor = Square.apply(x)  # type: ignore[no-untyped-call]
            return made

        return gradient(forward)

    made = spread(compute, BF16, runs=32)
    assert (format_of(made["y"]), format_of(made["grad"])) == ("fp32", "fp16")


def test_what_is_stored_is_rounded_once_and_its_gradient_passes() -> None:
    assert of(lambda: rounded_to("bf16")(X)) == "bf16"
    with computed_in("fp32"):
        assert of(lambda: rounded_to("fp16")(X * X)) == "fp16"
    made = spread(lambda: gradient(lambda x: rounded_to("bf16")(x)), BF16)
    assert exact(made["grad"])
    assert not exact(made["y"])
    made = spread(lambda: gradient(lambda x: gradient_rounded_to("bf16")(x)), FP32, runs=32)
    assert exact(made["y"])
    assert format_of(made["grad"]) == "bf16"
    equal = spread(lambda: {"x": rounded_to("bf16")(X[:1].expand(3, 40))}, BF16)["x"]
    assert equal is not None
    assert (equal.residuals == equal.residuals[:, :1]).all(), "equal values are stored equally"


@pytest.mark.parametrize("say", [computed_in, rounded_to, gradient_rounded_to])
def test_unknown_formats_are_refused(say: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match="unknown dtype 'fp8': expected one of fp32, fp64, bf16, fp16"):
        say("fp8")


def test_a_softmax_in_fp32_between_bf16_products() -> None:
    """As attention does it: real bf16 arithmetic stays within the spread, and a softmax in bf16 does not."""
    q, k = (torch.randn(32, 16, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2))

    def reference() -> dict[str, Tensor]:
        with computed_in("fp32"):
            scores = (q.double() @ k.double().T) / 4
            weights = scores.softmax(-1)
            return {"weights": rounded_to("bf16")(weights), "precise": weights}

    made = spread(reference, BF16)
    weights, precise = made["weights"], made["precise"]
    assert weights is not None
    assert precise is not None
    scores = (q.float() @ k.float().T) / 4
    right, wrong = scores.softmax(-1), F.softmax(scores.bfloat16(), -1)

    def worst(got: Tensor, s: Spread) -> float:
        return float(((got.double() - s.want).abs() / s.deviation.clamp(min=s.floor)).max())

    assert worst(right, precise) < 8
    assert worst(right.bfloat16(), weights) < 8
    assert worst(right.bfloat16(), precise) > 1000
    assert worst(wrong, precise) > 1000
