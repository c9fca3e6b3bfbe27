"""`spread`: K disturbed runs, in one go or one by one, and what is measured of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils.checkpoint
from torch import Tensor

from harness.errors import WrongUse
from harness.oracle import rounding, shadows
from harness.oracle.rounding import Spread, spread
from harness.oracle.shadows import NeedsSeparateRuns, NumbersStayInside, Shadows
from reference.dtypes import FORMATS
from reference.linear import LinearCase, expected, tensors
from reference.mesh import Mesh

FP32 = FORMATS["fp32"]
U = FP32.unit_roundoff
X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def one(compute: Callable[[], Tensor], **options: Any) -> Spread:
    made = spread(lambda: {"x": compute()}, options.pop("fmt", FP32), **options)["x"]
    assert made is not None
    return made


def block() -> dict[str, Tensor | None]:
    """A small transformer block, forward and backward."""
    g = torch.Generator().manual_seed(0)
    H, S, heads = 16, 6, 2

    def parameter(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=g, dtype=torch.float64) * scale).requires_grad_()

    x, w1, w2 = parameter(2, S, H), parameter(4 * H, H, scale=0.25), parameter(H, 4 * H, scale=0.125)
    qkv, out, norm, bias = parameter(3 * H, H, scale=0.25), parameter(H, H, scale=0.25), parameter(H), parameter(4 * H)
    h = F.layer_norm(x, (H,), norm)
    q, k, v = F.linear(h, qkv).view(2, S, 3, heads, H // heads).permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(H // heads)
    scores = scores.masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf)
    y = x + F.linear((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, S, H), out)
    y = y + F.linear(F.gelu(F.linear(F.rms_norm(y, (H,), norm), w1, bias)), w2)
    loss = F.cross_entropy(y.flatten(0, 1), torch.arange(12) % H, reduction="sum")
    torch.autograd.backward(loss)
    named = {"x": x, "w1": w1, "w2": w2, "qkv": qkv, "out": out, "norm": norm, "bias": bias}
    return {"y": y, "loss": loss, **{f"{name}.grad": p.grad for name, p in named.items()}}


def test_runs_together_and_one_by_one_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """In distribution: floors over 32 runs within a factor of 1.3, slopes within 2, elements within 3."""
    for name in ("fp32", "bf16"):
        together = spread(block, FORMATS[name], runs=32, seed=5)
        with monkeypatch.context() as patch:
            patch.setattr(rounding, "Shadows", _refusing)
            separate = spread(block, FORMATS[name], runs=32, seed=5)
        for tensor, s in together.items():
            other = separate[tensor]
            assert s is not None
            assert other is not None
            assert not torch.equal(s.residuals, other.residuals), "these are no longer different engines"
            assert torch.equal(s.want, other.want)
            assert 1 / 1.3 < s.floor / other.floor < 1.3 or s.want.dim() == 0, tensor
            assert 1 / 2 < s.slope_rms / other.slope_rms < 2, tensor
            ratio = s.residuals.square().mean(0).sqrt() / other.residuals.square().mean(0).sqrt()
            assert ((ratio > 1 / 3) & (ratio < 3) | (s.deviation < s.floor / 100)).all(), tensor


def _refusing(*args: Any) -> Shadows:
    raise NeedsSeparateRuns("for the test")


def test_the_reference_computes_undisturbed_beside_its_shadows() -> None:
    seen: list[dict[str, Tensor | None]] = []

    def compute() -> dict[str, Tensor | None]:
        seen.append(block())
        return seen[-1]

    spread(compute, FORMATS["bf16"])
    assert len(seen) == 2
    for name in ("y", "x.grad", "qkv.grad"):
        plain, beside = (run[name] for run in seen)
        assert plain is not None
        assert beside is not None
        # Not the same bits: a fused operation and its parts round differently, in float64.
        assert torch.allclose(plain, beside, rtol=1e-12, atol=1e-14)


def test_a_seed_decides_everything_and_no_state_is_left_behind() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one_run, again, other = (spread(block, FP32, seed=s) for s in (1, 1, 2))
    for name, s in one_run.items():
        same, different = again[name], other[name]
        assert s is not None
        assert same is not None
        assert different is not None
        assert torch.equal(s.residuals, same.residuals)
        assert not torch.equal(s.residuals, different.residuals)
        assert torch.equal(s.want, different.want)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() is torch.float32
    with pytest.raises(RuntimeError, match="mine"):
        spread(_failing, FP32)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(X * 3, X + X + X), "no mode is left on"


def _failing() -> dict[str, Tensor | None]:
    raise RuntimeError("mine")


def test_random_masks_are_the_same_in_all_runs() -> None:
    for compute in (
        lambda: F.dropout(X, 0.5),
        lambda: torch.native_dropout(X, 0.5, True)[0],
        lambda: X * torch.rand(5),
    ):
        s = one(compute)
        assert (s.deviation <= 4 * U * s.want.abs()).all()
        assert (s.deviation > 0).any()
        states = []
        for state in (1, 2):
            torch.manual_seed(state)
            states.append([one(compute, seed=seed).want for seed in (5, 6)])
        assert torch.equal(states[0][0], states[1][0]), "the state before does not count"
        assert not torch.equal(states[0][0], states[0][1])
    drawn = one(lambda: (X * 3).bernoulli_(0.5))
    assert (drawn.deviation == 0).all(), "numbers drawn over disturbed ones are the same in all runs"
    assert set(drawn.want.flatten().tolist()) == {0.0, 1.0}


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.T,
    "column": lambda x: x[:, 1:2],
    "every other": lambda x: x[1::2, ::2],
    "expanded": lambda x: x[:, :1].expand(6, 4),
    "overlapping": lambda x: x.as_strided((4, 3), (2, 1), 5),
    "permuted": lambda x: x.view(2, 3, 5).permute(2, 0, 1)[1],
}
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: (x[None, :, None] * x[None, :, :, None]).to(memory_format=torch.channels_last),
    "clone channels last": lambda x: x[None, None].clone(memory_format=torch.channels_last),
    "reshape": lambda x: x.reshape(-1)[1:] * 2,
    "sort": lambda x: x.sort(0).values,
    "roll": lambda x: x.roll(1, 0),
    "cat": lambda x: torch.cat([x, X[: len(x), :1]], 1),
    "stack": lambda x: torch.stack([x, x], -1),
    "pad": lambda x: F.pad(x, (1, 0)),
    "index": lambda x: x[[0, -1]],
    "gather": lambda x: x.gather(0, torch.zeros(x.shape, dtype=torch.int64)),
    "scatter": lambda x: torch.zeros(x.shape).double().scatter_add(0, torch.zeros(x.shape, dtype=torch.int64), x),
    "sum": lambda x: x.sum(0),
    "sum of all": lambda x: x.sum(),
    "sum, kept": lambda x: x.sum((0, -1), keepdim=True),
    "mean": lambda x: x.mean(-1),
    "largest": lambda x: x.amax(1, keepdim=True),
    "number": lambda x: x.sum().sum(),
    "matmul": lambda x: x @ x.T,
    "vector": lambda x: x @ x[0],
    "batched": lambda x: x[None].expand(2, -1, -1) @ X[: x.shape[1], :2],
    "from the left": lambda x: X[:2, : len(x)] @ x if len(x) < 6 else x,
    "addmm": lambda x: torch.addmm(x[:, :1], x, x.T, beta=-0.5, alpha=3),
    "addmm, plain": lambda x: torch.addmm(x[:, 0], x, x.T),
    "softmax": lambda x: x.softmax(0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], x[0], x[-1]),
    "broadcast": lambda x: x[:, None] * x[None, :, :1] + x[0, 0],
    "fill with a number": lambda x: x.masked_fill(x > 1, x[0, 0]),
    "where": lambda x: torch.where(x > 1, x[0, 0], x[:, :1]),
    "clamp": lambda x: x.clamp(x[0, 0], x[0]),
    "out": lambda x: torch.mul(x, x, out=torch.empty(0).double()),
    "out, of a sum": lambda x: torch.cumsum(x, 0, out=torch.empty(x.shape).double()),
    "out, over disturbed": lambda x: torch.sort(x, 0, out=(x * 5, torch.empty(0).long()))[0],
    "in place": lambda x: x.clone().mul_(x[0]).add_(x),
    "part in place": lambda x: _doubled(x),
    "fill": lambda x: x.clone().fill_(0.5) + x,
    "conv": lambda x: F.conv1d(x[None], x[:, None, :1], groups=len(x)),
    "var_mean": lambda x: torch.stack(torch.var_mean(x, 0)),
    "split": lambda x: torch.cat(x.split(1)[::-1]),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True, eps=0.5),
    "dropout": lambda x: F.dropout(x, 0.5),
    "compare": lambda x: (x > x.mean()).double(),
}


def _doubled(x: Tensor) -> Tensor:
    base = x.clone()
    base[1:] *= 3
    base[:, 0].copy_(x[:, -1])
    return base


@pytest.mark.parametrize("step", STEPS)
def test_copies_follow_whatever_happens_to_the_memory(step: str) -> None:
    """With fp64's own roundoff all copies stay next to the undisturbed values, and every result is reached."""
    for layout, view in LAYOUTS.items():
        s = one(lambda view=view: STEPS[step](view(X * 3 + 2)), fmt=FORMATS["fp64"], runs=3)  # type: ignore[misc]
        assert (s.deviation <= 1e-12 * s.want.abs().max().clamp(min=1)).all(), layout
        coarse = one(lambda view=view: STEPS[step](view(X * 3 + 2)), fmt=FORMATS["bf16"], runs=3)  # type: ignore[misc]
        reached = (coarse.deviation > 0) | (coarse.want == 0)
        assert reached.all() or step in ("dropout", "compare", "pad", "scatter", "cat"), layout
        assert not coarse.ambiguous.any()


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


READERS: dict[str, Callable[[], Tensor]] = {
    "item": lambda: X * float((X * 3).sum()),
    "if": lambda: X * 3 if (X * 3).sum() > 0 else X * 5,
    "numpy": lambda: torch.from_numpy(np.tanh((X * 3).numpy())),
    "array": lambda: torch.from_numpy(np.asarray(X * 3) + 1),
    "tolist": lambda: torch.tensor((X * 3).tolist(), dtype=torch.float64),
    "mask": lambda: (X * 3)[X * 3 > 0.5],
    "nonzero": lambda: (X * 3)[(X * 3 > 0.5).nonzero()[:, 0]],
    "bits": lambda: (X * 3).view(torch.int64).add(2).view(torch.float64) * 3,
    "bernoulli": lambda: X * 3 * torch.bernoulli((X * 3).sigmoid()),
}


@pytest.mark.parametrize("name", READERS)
def test_what_looks_at_numbers_runs_one_by_one(name: str) -> None:
    calls = []

    def compute() -> Tensor:
        calls.append(name)
        return READERS[name]()

    s = one(compute, runs=4)
    assert len(calls) > 2 + 3, "one undisturbed, one attempt, four disturbed"
    assert (s.deviation > 0).any()
    assert (s.deviation <= 100 * U * s.want.abs().max()).all()
    calls.clear()
    one(lambda: (calls.append(name), X * 3)[1], runs=4)
    assert len(calls) == 2


def test_numbers_that_no_rounding_reaches_may_be_read() -> None:
    def compute() -> Tensor:
        calls.append(float(X[0, 0]))
        return X * (2 if bool((X > 0).any()) else 3) * X[X > 0].sum()

    calls: list[float] = []
    assert (one(compute).deviation > 0).all()
    assert len(calls) == 2


def test_an_optimizer_can_be_a_reference() -> None:
    def compute() -> dict[str, Tensor | None]:
        p = X.clone().requires_grad_()
        optimizer = torch.optim.AdamW([p], lr=1e-2, foreach=True)
        for _ in range(2):
            optimizer.zero_grad()
            torch.autograd.backward((p * p * 3).sum())
            norm = torch.nn.utils.clip_grad_norm_([p], 1.0)
            optimizer.step()
        return {"p": p, "norm": norm, "grad": p.grad, "m": optimizer.state[p]["exp_avg"]}

    for name, s in spread(compute, FP32, runs=4).items():
        assert s is not None
        assert 0.01 * U < s.floor / float(s.want.abs().max()) < 100 * U, name


def test_a_module_of_torch_can_be_a_reference() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True).double()
    conv = torch.nn.Sequential(torch.nn.Conv1d(6, 4, 3), torch.nn.BatchNorm1d(4), torch.nn.GELU()).double()

    def compute() -> dict[str, Tensor | None]:
        for p in [*layer.parameters(), *conv.parameters()]:
            p.grad = None
        x = torch.randn(3, 6, 8, dtype=torch.float64, requires_grad=True)
        y = conv(layer(x))
        torch.autograd.backward(y.square().mean())
        return {"x": x.grad, "y": y, **{name: p.grad for name, p in layer.named_parameters()}}

    state = {k: v.clone() for k, v in conv[1].state_dict().items()}
    for name, s in spread(compute, FORMATS["fp16"], runs=4).items():
        conv[1].load_state_dict(state)
        assert s is not None
        assert s.floor > 0, name
        assert s.floor < 0.2 * float(s.want.abs().max()) or name.endswith("in_proj_bias"), name


def test_shadows_of_dead_storages_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute() -> Tensor:
        x = X
        for _ in range(200):
            x = x * 0.99 + 0.01
        return x

    want = one(compute)
    held = []
    for limit in (1 << 28, 1 << 14):
        monkeypatch.setattr(shadows, "_SWEEP", limit)
        assert torch.equal(one(compute).residuals, want.residuals)
        with Shadows(FP32, 0, 8) as mode:
            compute()
        held.append(len(mode._flat))
    assert held[0] == 400
    assert held[1] < 20


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


def test_checkpoints_and_inference_and_fast_paths() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double().eval()
    x = torch.randn(3, 6, 8, dtype=torch.float64)

    def without_gradient() -> Tensor:
        with torch.no_grad():
            made: Tensor = layer(x * 3)
        return made * float(made.sum() > -1e9)

    def inference() -> Tensor:
        with torch.inference_mode():
            return (x * 3).softmax(-1)

    def recomputed() -> Tensor:
        leaf = X.clone().requires_grad_()
        y = torch.utils.checkpoint.checkpoint(lambda t: torch.tanh(t * 3) * t, leaf, use_reentrant=False)
        torch.autograd.backward(y.sum())
        assert leaf.grad is not None
        return leaf.grad

    for compute in (without_gradient, inference, recomputed):
        s = one(compute, runs=4)
        assert 0.01 * U < s.floor < 20 * U, compute.__name__
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("runs", [0, -1])
def test_at_least_one_run_is_needed(runs: int) -> None:
    with pytest.raises(WrongUse, match=f"runs {runs} must be at least 1"):
        one(lambda: X * 3, runs=runs)
    assert one(lambda: X * 3, runs=1).residuals.shape == (1, 6, 5)


def test_the_guard_stops_disturbed_numbers_only() -> None:
    mode = Shadows(FP32, 0, 2)
    with NumbersStayInside(mode), mode:
        y = X * 3
        assert X.numpy().shape == y.shape == (6, 5)
        with pytest.raises(NeedsSeparateRuns, match="numpy hands numbers to Python"):
            y[0].numpy()


def test_the_linear_reference_has_a_spread() -> None:
    case = LinearCase(Mesh.of(tp=2, dp=2), "column", 16, 12, ((4,), (3,)), bias=True, input_requires_grad=False)
    given = {name: torch.randn(t.shape, dtype=torch.float64) for name, t in tensors(case).items()}
    made = spread(lambda: expected(case, given), case.format)
    plain = expected(case, given)
    assert set(made) == set(plain)
    for name, value in plain.items():
        s = made[name]
        assert (value is None) == (s is None), name
        if value is not None and s is not None:
            assert torch.equal(s.want, value)
            assert (s.deviation > 0).any()
            assert s.floor < 100 * U * float(value.abs().max())
