"""The rounding model against torch's own arithmetic in fp32, fp16 and bf16: single operations and compositions.

Every comparison is two-sided: what torch computes stays within `LIMIT` of the computed spread, and a planted error of
64 unit roundoffs in all elements, or of 64 tolerances in one, does not. Seeds are fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from harness.oracle.rounding import Spread, spread
from reference.dtypes import FORMATS, Format

#: Over 40 seeds, 3 formats and all operations below, the largest statistic seen was 4.7.
LIMIT = 8.0
SEEDS = range(3)

Make = Callable[[torch.Generator], Tensor]
T, H, V = 6, 24, 10


def normal(*shape: int) -> Make:
    return lambda g: torch.randn(shape, generator=g, dtype=torch.float64)


def positive(*shape: int) -> Make:
    return lambda g: torch.rand(shape, generator=g, dtype=torch.float64) + 0.25


def index(below: int, *shape: int) -> Make:
    return lambda g: torch.randint(0, below, shape, generator=g)


def last(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x, -1)


ELEMENTWISE: dict[str, tuple[Callable[..., Tensor], list[Make]]] = {
    "add": (torch.add, [normal(T, H), normal(H)]),
    "mul": (torch.mul, [normal(T, H), normal(T, H)]),
    "div": (torch.div, [normal(T, H), positive(T, H)]),
    "times a number": (lambda x: x * (1 / 0.9), [normal(T, H)]),
    "over a number": (lambda x: x / 7, [normal(T, H)]),
    "lerp": (torch.lerp, [normal(T, H), normal(T, H), positive(T, H)]),
    "addcmul": (lambda a, b, c: torch.addcmul(a, b, c, value=0.3), [normal(T, H)] * 3),
    "addcdiv": (lambda a, b, c: torch.addcdiv(a, b, c, value=0.3), [normal(T, H), normal(T, H), positive(T, H)]),
    "pow": (torch.pow, [positive(T, H), normal(T, H)]),
    "cube": (lambda x: x**3, [normal(T, H)]),
    "cross": (torch.linalg.cross, [normal(T, 8, 3), normal(T, 8, 3)]),
    "logaddexp": (torch.logaddexp, [normal(T, H), normal(T, H)]),
    **{
        f.__name__: (f, [normal(T, H)])
        for f in (torch.exp, torch.tanh, torch.sigmoid, torch.erf, torch.sin, torch.expm1)
    },
    **{f.__name__: (f, [positive(T, H)]) for f in (torch.sqrt, torch.rsqrt, torch.log, torch.reciprocal)},
    **{
        f.__name__: (f, [normal(T, H)])
        for f in (F.gelu, F.silu, F.softplus, F.mish, F.elu, F.selu, F.leaky_relu, F.hardswish, F.logsigmoid, F.glu)
    },
    "gelu far down": (lambda x: F.gelu(x / 4 - 4), [normal(T, H)]),
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), [normal(T, H)]),
}

SUMMING: dict[str, tuple[Callable[..., Tensor], list[Make]]] = {
    "matmul": (torch.matmul, [normal(T, H), normal(H, V)]),
    "matmul, positive": (torch.matmul, [positive(T, 400), positive(400, V)]),
    "vector times matrix": (torch.matmul, [normal(H), normal(H, V)]),
    "bmm": (torch.bmm, [normal(3, T, H), normal(3, H, V)]),
    "linear": (F.linear, [normal(T, H), normal(V, H), normal(V)]),
    "einsum": (lambda a, b: torch.einsum("tsh,hv->tv", a, b), [normal(T, 3, H), normal(H, V)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [normal(2, 3, 6, 6), normal(4, 3, 3, 3), normal(4)]),
    "sum": (lambda x: x.sum(0), [normal(20, H)]),
    "sum, positive": (lambda x: x.sum(0), [positive(400, H)]),
    "mean": (lambda x: x.mean(-1), [normal(T, H)]),
    "var": (lambda x: x.var(-1), [normal(T, H)]),
    "std": (lambda x: x.std(0), [normal(T, H)]),
    "norm": (lambda x: x.norm(dim=-1), [normal(T, H)]),
    "prod": (lambda x: x.prod(-1), [positive(T, 6)]),
    "cumsum": (lambda x: x.cumsum(-1), [normal(T, H)]),
    "index_add": (lambda x, i, y: x.index_add(0, i, y), [normal(V, H), index(V, 20), normal(20, H)]),
    "scatter_add": (lambda x, i, y: x.scatter_add(0, i, y), [normal(V, H), index(V, 20, H), normal(20, H)]),
    "embedding": (lambda w, i: F.embedding(i, w), [normal(V, H), index(V, 20)]),
    "avg_pool": (lambda x: F.avg_pool2d(x, 2), [normal(2, 3, 6, 6)]),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [normal(1, 2, 4, 4)]),
}

COMPOSITE: dict[str, tuple[Callable[..., Tensor], list[Make]]] = {
    "softmax": (last(torch.softmax), [normal(T, H)]),
    "log_softmax": (last(torch.log_softmax), [normal(T, H)]),
    "log_softmax, confident": (lambda x: (8 * x).log_softmax(-1), [normal(T, H)]),
    "logsumexp": (last(torch.logsumexp), [normal(T, H)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (H,), w, b), [normal(T, H), positive(H), normal(H)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (H,), w), [normal(T, H), positive(H)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), [normal(T, 8, 5), positive(8), normal(8)]),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        [normal(16, H), positive(H), normal(H)],
    ),
    "cross_entropy": (F.cross_entropy, [normal(T, V), index(V, T)]),
    "smoothed": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), [normal(T, V), index(V, T)]),
    "mse": (F.mse_loss, [normal(T, H), normal(T, H)]),
    "l1": (F.l1_loss, [normal(T, H), normal(T, H)]),
    "huber": (F.huber_loss, [normal(T, H), normal(T, H)]),
    "smooth_l1": (F.smooth_l1_loss, [normal(T, H), normal(T, H)]),
    "bce": (lambda x, t: F.binary_cross_entropy_with_logits(x, t.clamp(0, 1)), [normal(T, H), positive(T, H)]),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [normal(2, 2, T, 8)] * 3),
    "cosine": (lambda a, b: F.cosine_similarity(a, b, -1), [normal(T, H), normal(T, H)]),
    "normalize": (F.normalize, [normal(T, H)]),
    "loss of a product": (lambda x, w: (x @ w).mean(), [normal(T, H), normal(H, V)]),
}


def results(function: Callable[..., Tensor], given: Sequence[Tensor], grad: Tensor, dtype: torch.dtype) -> Any:
    """The result and all gradients, computed in ``dtype``."""
    leaves = [x.to(dtype).clone().requires_grad_() if x.is_floating_point() else x for x in given]
    y = function(*leaves)
    torch.autograd.backward(y, grad.to(dtype))
    return {"y": y.detach(), **{f"grad {i}": x.grad for i, x in enumerate(leaves) if x.is_floating_point()}}


def worst(got: Tensor, s: Spread) -> float:
    """The largest deviation of an element over its tolerance."""
    off = (got.double() - s.want).abs()
    ratio = torch.where(off == 0, 0.0, off / s.deviation.clamp(min=s.floor))
    return math.inf if ratio.isnan().any() else float(ratio.max())


def slope(got: Tensor, s: Spread) -> float:
    """How far the elements lean together, over how far rounding makes them."""
    square = float(s.want.square().sum())
    lean = abs(float(((got.double() - s.want) * s.want).sum()) / square) if square else 0.0
    return lean / s.slope_rms if lean and s.slope_rms else math.inf if lean else 0.0


def drawn(function: Callable[..., Tensor], make: Sequence[Make], fmt: Format, seed: int) -> tuple[list[Tensor], Tensor]:
    """Arguments and an output gradient that the format represents."""
    g = torch.Generator().manual_seed(seed)
    given = [m(g) for m in make]
    given = [x.to(fmt.torch_dtype).double() if x.is_floating_point() else x for x in given]
    grad = torch.randn(function(*given).shape, generator=g, dtype=torch.float64)
    return given, grad.to(fmt.torch_dtype).double()


def check_two_sided(
    function: Callable[..., Tensor], make: Sequence[Make], fmt: Format, seed: int, factor: bool = True
) -> None:
    """Right arithmetic passes in every result; planted errors fail in every one that rounding can touch."""
    given, grad = drawn(function, make, fmt, seed)
    spreads = spread(lambda: results(function, given, grad, torch.float64), fmt, seed=seed)
    for name, got in results(function, given, grad, fmt.torch_dtype).items():
        s = spreads[name]
        assert s is not None
        assert not s.ambiguous.any()
        seen = (worst(got, s), slope(got, s))
        assert max(seen) <= LIMIT, f"{name}: worst {seen[0]:.3g}, slope {seen[1]:.3g}"
        if got.numel() >= V and factor:  # one number may be the difference of large ones
            tilted = got.double() * (1 + 64 * fmt.unit_roundoff)
            assert max(worst(tilted, s), slope(tilted, s)) > LIMIT, f"{name}: a factor of 64 roundoffs is not seen"
        if s.floor:
            moved = got.double().flatten()
            moved[-1] += 64 * max(float(s.deviation.flatten()[-1]), s.floor)
            assert worst(moved.reshape(got.shape), s) > LIMIT, f"{name}: an element off by 64 tolerances is not seen"


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", [*ELEMENTWISE, *SUMMING, *COMPOSITE])
def test_torch_stays_within_the_spread_and_planted_errors_do_not(name: str, dtype: str) -> None:
    function, make = {**ELEMENTWISE, **SUMMING, **COMPOSITE}[name]
    for seed in SEEDS:
        check_two_sided(function, make, FORMATS[dtype], seed, factor=name != "gelu far down")  # 1 + erf cancels there


def composition(seed: int) -> tuple[Callable[..., Tensor], list[Make]]:
    """A random function of x [T, H] and weights, of two to five steps."""
    g = torch.Generator().manual_seed(1000 + seed)

    def choose(n: int) -> int:
        return int(torch.randint(n, (), generator=g))

    steps: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
        lambda x, w, b: x + (x @ w) / H**0.5,
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        lambda x, w, b: F.layer_norm(x, (H,), b, None),
        lambda x, w, b: F.rms_norm(x, (H,), b),
        lambda x, w, b: x * torch.sigmoid(x @ w),
        lambda x, w, b: torch.softmax(x @ x.T / H**0.5, -1) @ x,
        lambda x, w, b: torch.tanh(x) + b,
        lambda x, w, b: F.silu(x).reshape(T, 2, H // 2).transpose(0, 1).reshape(T, H),
        lambda x, w, b: torch.cat([x[:, : H // 2] * 0.7, x[:, H // 2 :] - b[: H // 2]], 1),
        lambda x, w, b: x.masked_fill(torch.ones(T, H).tril().bool(), 0.0) + x.mean(0),
    ]
    chosen = [steps[choose(len(steps))] for _ in range(2 + choose(4))]

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        for i, step in enumerate(chosen):
            x = step(x, weights[2 * i], weights[2 * i + 1])
        return x.log_softmax(-1) if seed % 3 == 0 else x

    return run, [normal(T, H), *[m for _ in chosen for m in (normal(H, H), positive(H))]]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("seed", range(12))
def test_compositions_stay_within_the_spread_and_planted_errors_do_not(seed: int, dtype: str) -> None:
    function, make = composition(seed)
    fmt = FORMATS[dtype]
    given, grad = drawn(function, make, fmt, seed)

    def compute(d: torch.dtype) -> Any:
        return {name: value for name, value in results(function, given, grad, d).items() if value is not None}

    spreads = spread(lambda: compute(torch.float64), fmt, seed=seed)
    faults = []
    for name, got in compute(fmt.torch_dtype).items():
        s = spreads[name]
        assert s is not None
        seen = (worst(got, s), slope(got, s))
        assert max(seen) <= LIMIT, f"{name}: worst {seen[0]:.3g}, slope {seen[1]:.3g}"
        moved = got.double().flatten()
        moved[-1] += 64 * max(float(s.deviation.flatten()[-1]), s.floor)
        faults.append(worst(moved.reshape(got.shape), s) > LIMIT or not s.floor)
    assert all(faults)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("kind", ["normal", "positive", "cancelling"])
def test_any_order_of_summation_stays_within_the_spread(kind: str, dtype: str) -> None:
    """One after another from either end, in blocks, as partial sums of eight ranks, by torch."""
    fmt, k = FORMATS[dtype], 64
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        a, b = positive(8, k)(g), positive(k, 8)(g)
        if kind != "positive":
            a, b = normal(8, k)(g), normal(k, 8)(g)
        if kind == "cancelling":
            a[:, k // 2 :] = -a[:, : k // 2] * (1 + 2.0**-6 * normal(8, k // 2)(g))
            b[k // 2 :] = b[: k // 2]
        a, b = (x.to(fmt.torch_dtype) for x in (a, b))
        s = spread(lambda a=a, b=b: {"y": a.double() @ b.double()}, fmt, seed=seed)["y"]  # type: ignore[misc]
        assert s is not None
        columns = [a[:, i : i + 1] * b[i : i + 1] for i in range(k)]
        shards = [p @ q for p, q in zip(a.chunk(8, 1), b.chunk(8, 0), strict=True)]
        blocks = [sum(columns[i : i + 8]) for i in range(0, k, 8)]
        for order in (columns, columns[::-1], blocks, shards, shards[::-1], [a @ b]):
            got = order[0] + sum(order[1:])
            assert isinstance(got, Tensor)
            assert worst(got, s) <= 2 * LIMIT, "partial sums kept in the format itself may err twice as much"
        dropped = a[:, 8:] @ b[8:]
        assert worst(dropped, s) > 2 * LIMIT, "the partial sum of one rank is missing"
