"""What the rounding model does with each kind of operation: what it disturbs, how far, and what it refuses."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from harness.errors import WrongUse
from harness.oracle import operations
from harness.oracle.noise import Noise, amplitude
from harness.oracle.operations import Kind, UnknownOperation, register
from harness.oracle.rounding import Rounding, spread
from reference.dtypes import FORMATS, Format

FP32 = FORMATS["fp32"]
U = FP32.unit_roundoff
RUNS = 64

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(6, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
EVEN = torch.arange(30, dtype=torch.float64).reshape(6, 5)


def disturbed(function: Callable[..., Any], *args: Any, runs: int = RUNS, fmt: Format = FP32) -> Tensor:
    """Results of disturbed runs, [K, *shape], each on copies of the arguments."""
    made = []
    for seed in range(runs):
        copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
        with Rounding(fmt, seed):
            made.append(function(*copies))
    return torch.stack(made)


def largest(function: Callable[..., Any], *args: Any, fmt: Format = FP32) -> Tensor:
    """The largest deviation of each element over all runs, in unit roundoffs."""
    copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
    return (disturbed(function, *args, fmt=fmt) - function(*copies)).abs().amax(0) / fmt.unit_roundoff


def assert_scale(got: Tensor, scale: Tensor) -> None:
    """Deviations up to the scale, and not much below it: 64 numbers in [-1, 1] have one above 0.8."""
    assert (got <= scale * (1 + 1e-6) + 1e-9).all()
    assert (got >= 0.8 * scale).all()


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
        (lambda x, y: torch.index_add(x, 0, torch.tensor([1, 1, 4]), y[:3]), (X, Y)),
        (lambda x, y: torch.index_put(x, [torch.tensor([1, 1, 4])], y[:3], accumulate=True), (X, Y)),
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
        "index_add",
        "index_put",
    ],
)
def test_sums_err_relative_to_the_sum_of_magnitudes(function: Callable[..., Tensor], args: tuple[Any, ...]) -> None:
    """In bf16, which is summed in fp32: the scale is that of the terms, whatever the order in which they are added."""
    magnitudes = function(*[a.abs() if isinstance(a, Tensor) else a for a in args]).abs()
    assert_scale(largest(function, *args, fmt=FORMATS["bf16"]), magnitudes)
    assert (magnitudes > 1.5 * function(*args).abs()).any(), "a case without cancellation tells nothing"


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


EXACT: dict[str, Callable[..., Any]] = {
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "relu": lambda x, y: F.relu(x),
    "maximum": torch.maximum,
    "clamp": lambda x, y: x.clamp(-0.5, 0.5),
    "sign": lambda x, y: x.sign(),
    "where": lambda x, y: torch.where(x > y, x, y),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 7.0),
    "floor": lambda x, y: x.floor(),
    "round": lambda x, y: x.round(),
    "to": lambda x, y: x.to(torch.float32).to(torch.float64),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]),
    "transpose": lambda x, y: x.T.contiguous(),
    "expand": lambda x, y: x[:, None].expand(-1, 3, -1).reshape(6, 15),
    "gather": lambda x, y: x.gather(0, torch.zeros(2, 5, dtype=torch.int64)),
    "index": lambda x, y: x[[0, 2, 0]],
    "write": lambda x, y: x.index_put([torch.tensor([0, 2])], y[:2]),
    "scatter": lambda x, y: x.scatter(0, torch.zeros(2, 5, dtype=torch.int64), y),
    "embedding": lambda x, y: F.embedding(torch.tensor([0, 2, 0]), x),
    "sort": lambda x, y: x.sort(-1).values,
    "topk": lambda x, y: x.topk(2).values,
    "amax": lambda x, y: x.amax(0),
    "max": lambda x, y: x.max(0).values,
    "argmax": lambda x, y: x.argmax(0),
    "compare": lambda x, y: x >= y,
    "tril": lambda x, y: x.tril(),
    "pad": lambda x, y: F.pad(x, (1, 1)),
    "roll": lambda x, y: x.roll(1, 0),
    "max_pool": lambda x, y: F.max_pool1d(x[None], 2),
    "double": lambda x, y: x * 2,
    "quarter": lambda x, y: x / 4,
    "whole part": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "infinity norm": lambda x, y: torch.linalg.vector_norm(x, math.inf),
    "zeros": lambda x, y: torch.zeros_like(x) + 0.0,
    "constant": lambda x, y: torch.full((3,), 1.5, dtype=torch.float64),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_moves_chooses_or_compares_leaves_bits_alone(name: str) -> None:
    function = EXACT[name]
    want = function(X, Y)
    for fmt in FORMATS.values():
        for got in disturbed(function, X, Y, runs=4, fmt=fmt):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
    assert not torch.equal(disturbed(torch.mul, X, Y, runs=1)[0], X * Y), "the mode disturbs what is not exact"


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


def test_equal_values_are_rounded_equally_where_strides_show_it() -> None:
    got = disturbed(lambda x: x.expand(6, 5) / 3, X[:1, :1])
    assert (got == got[:, :1, :1]).all()
    got = disturbed(lambda x, y: torch.mm(x.expand(4, 5), y), X[:1], Y.T[:, :3])
    assert (got == got[:, :1]).all()
    assert (got[:, :, 0] != got[:, :, 1]).any()
    assert (disturbed(torch.mul, torch.ones(6, 5).double(), torch.ones(6, 5).double())[:, 0] != 1).any()


def test_masks_with_infinities_do_not_become_nan() -> None:
    scores = X.masked_fill(torch.ones(6, 5).triu(1).bool(), -math.inf)
    want = scores.softmax(-1)
    for name, function in (
        ("fused", lambda x: x.softmax(-1)),
        ("by hand", lambda x: (x - x.amax(-1, True)).exp() / (x - x.amax(-1, True)).exp().sum(-1, True)),
        ("scaled", lambda x: (x / 3 + 1).mul(3.0)),
        ("logs", lambda x: x.log_softmax(-1)),
    ):
        plain, runs = function(scores), disturbed(function, scores)
        assert torch.equal(runs.isneginf(), plain.isneginf().expand_as(runs)), name
        assert torch.equal(runs.isnan(), plain.isnan().expand_as(runs)), name
        assert (runs != plain).any(), name
    assert torch.equal(disturbed(lambda x: x.softmax(-1), scores) == 0, (want == 0).expand(RUNS, 6, 5))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_left_alone(bad: float) -> None:
    x = X.clone()
    x[0, 0] = bad
    for function in (lambda x: x + 1, lambda x: x @ Y.T, lambda x: x.sum(0), lambda x: x.mean(1), lambda x: x * 0.1):
        plain, runs = function(x), disturbed(function, x)
        finite = plain.isfinite()
        assert not finite.all()
        assert finite.any()
        assert torch.equal(runs[:, ~finite].nan_to_num(7.0), plain[~finite].nan_to_num(7.0).expand(RUNS, -1))
        assert (runs[:, finite] != plain[finite]).any(0).all()


IN_PLACE: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "add_": (lambda x: x.add_(Y), lambda x: x + Y),
    "mul_": (lambda x: x.mul_(0.3), lambda x: x * 0.3),
    "addmm_": (lambda x: x.addmm_(Y, Y[:5]), lambda x: torch.addmm(x, Y, Y[:5])),
    "addcmul_": (lambda x: x.addcmul_(Y, Y, value=0.3), lambda x: torch.addcmul(x, Y, Y, value=0.3)),
    "silu_": (lambda x: F.silu(x, inplace=True), F.silu),
    "sigmoid_": (lambda x: x.sigmoid_(), torch.sigmoid),
    "index_add_": (
        lambda x: x.index_add_(0, torch.tensor([1, 1]), Y[:2]),
        lambda x: x.index_add(0, torch.tensor([1, 1]), Y[:2]),
    ),
    "item": (lambda x: x.__setitem__((slice(None), 1), Y[:, 0] * 3), lambda x: _with_column(x, Y[:, 0] * 3)),
    "out": (lambda x: torch.mul(x, Y, out=x), lambda x: x * Y),
    "out of a sum": (lambda x: torch.cumsum(Y, 0, out=x), lambda x: Y.cumsum(0)),
    "out of a fused one": (lambda x: torch.ops.aten.silu.out(Y, out=x), lambda x: F.silu(Y)),
    "list": (lambda x: torch._foreach_mul_([x], [Y]), lambda x: x * Y),
    "list of scalars": (
        lambda x: torch._foreach_addcdiv_([x], [Y], [Y.abs() + 1], [0.3]),
        lambda x: x + 0.3 * Y / (Y.abs() + 1),
    ),
}


def _with_column(x: Tensor, column: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1] = column
    return x


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("engine", ["separate", "together"])
def test_in_place_and_out_forms_write_disturbed_values_where_they_belong(name: str, engine: str) -> None:
    write, functional = IN_PLACE[name]

    def on_a_view() -> dict[str, Tensor]:
        base = torch.zeros(8, 12, dtype=torch.float64)
        view = base[1:7, 1:11:2]
        view.copy_(X)
        write(view)
        if engine == "separate":
            float(base[0, 0] * 3 + X.sum() * 3)  # a number that Python has seen
        return {"base": base, "view": view.clone(), "again": base[1:7, 1:11:2] * 3}

    spreads = spread(on_a_view, FP32, seed=3)
    base, view, again = (spreads[k] for k in ("base", "view", "again"))
    assert base is not None
    assert view is not None
    assert again is not None
    # Not the same bits: strided and dense memory have kernels of their own, and float64 rounds in each.
    assert torch.allclose(view.want, functional(X), rtol=1e-14)
    assert torch.equal(base.residuals[:, 1:7, 1:11:2], view.residuals), "the base holds what the view holds"
    touched = view.deviation != 0
    assert touched.any()
    assert float(base.deviation.sum()) == float(view.deviation.sum()), "and nothing beside the view is disturbed"
    assert (view.deviation < 40 * U * view.want.abs().max()).all()
    assert (again.deviation[touched] > view.deviation[touched]).all(), "what comes later starts from it"


def test_each_result_of_several_is_disturbed() -> None:
    runs = [disturbed(lambda x, i=i: torch.var_mean(x, 0)[i], X) for i in range(2)]
    want = torch.var_mean(X, 0)
    for got, plain in zip(runs, want, strict=True):
        assert ((got - plain).abs().amax(0) > 0.3 * U * plain.abs()).all()
        assert ((got - plain).abs() < 40 * U * plain.abs()).all(), "as far as roundings, and no further"
    conv, weight = X[None], Y.T[:, :, None].contiguous()
    want = torch.ops.aten.convolution_backward(
        torch.ones(1, 5, 5).double(), conv, weight, [5], [1], [0], [1], False, [0], 1, [True] * 3
    )
    for i, plain in enumerate(want):
        got = disturbed(
            lambda g, x, w, i=i: torch.ops.aten.convolution_backward(
                g, x, w, [5], [1], [0], [1], False, [0], 1, [True] * 3
            )[i],
            torch.ones(1, 5, 5).double(),
            conv,
            weight,
        )
        assert ((got - plain).abs().amax(0) > 0.3 * U * plain.abs()).all()
    values, places = X.sort(-1)
    with Rounding(FP32, 0):
        got_values, got_places = X.sort(-1)
    assert torch.equal(got_values, values)
    assert torch.equal(got_places, places)


FUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "softmax of the first": lambda x: x.softmax(0),
    "softmax of a number": lambda x: x[0, 0].softmax(0).reshape(1),
    "log_softmax": lambda x: x.log_softmax(0),
    "logsumexp": lambda x: x.logsumexp([0, 1]),
    "layer_norm": lambda x: F.layer_norm(x, (6, 5)),
    "group_norm": lambda x: F.group_norm(x[None], 3),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(5).double(), torch.ones(5).double(), training=True),
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "celu": lambda x: F.celu(x, 0.7),
    "selu": F.selu,
    "glu": lambda x: F.glu(x, 0),
    "softplus": lambda x: F.softplus(x, 2.0, 1.0),
    "std": lambda x: x.std(0, keepdim=True),
    "var": lambda x: x.var(correction=0),
    "std_mean": lambda x: torch.cat(torch.std_mean(x, 1)),
    "dropout": lambda x: F.dropout(x, 0.4),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(6) % 5, ignore_index=2, label_smoothing=0.1),
    "mse": lambda x: F.mse_loss(x, Y),
    "huber": lambda x: F.huber_loss(x, Y, delta=0.7),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, Y, reduction="sum"),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, Y.sigmoid()),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], Y[None], x[None], is_causal=True),
    "attention to nothing": lambda x: F.scaled_dot_product_attention(
        x[None], Y[None], x[None], torch.ones(6, 6).tril(-1).bool()
    ),
    "logaddexp": lambda x: torch.logaddexp(x, Y),
    "lerp": lambda x: torch.lerp(x, Y, 0.3),
    "logit": lambda x: torch.logit(x.sigmoid()),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("engine", ["separate", "together"])
def test_what_is_taken_apart_computes_the_same_and_errs_no_less(name: str, engine: str) -> None:
    """Results and gradients: within 1e-12 of torch's kernel in float64, and in fp32 disturbed as fits the format."""

    def compute() -> dict[str, Tensor]:
        x = X.clone().requires_grad_()
        y = FUSED[name](x)
        torch.autograd.backward(y, torch.linspace(0.5, 1.5, y.numel()).double().reshape(y.shape))
        if engine == "separate":
            float((x.detach() * 3).sum())
        assert x.grad is not None
        return {"y": y.detach(), "grad": x.grad}

    quiet = Format("exact", torch.float64, 53)
    for s in spread(compute, quiet, seed=1).values():
        assert s is not None
        assert (s.deviation <= 1e-12 * s.want.abs().max().clamp(min=1)).all()
    for result, s in spread(compute, FP32, seed=1).items():
        assert s is not None
        assert 0.1 * U * s.want.abs().mean() <= s.floor <= 200 * U * s.want.abs().max().clamp(min=1), result


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """A namespace of its own, taken back afterwards with everything that was said about it."""
    made = torch.library.Library(f"rounding_{uuid.uuid4().hex}", "DEF")
    before = dict(operations._registered)
    yield made
    made._destroy()
    operations._registered.clear()
    operations._registered.update(before)
    operations._rules.clear()


def _define(library: torch.library.Library, schema: str, function: Callable[..., Any]) -> Any:
    name = library.define(schema)
    library.impl(name, function, "CompositeExplicitAutograd")
    return getattr(getattr(torch.ops, library.ns), name)


def test_unknown_operations_are_reported_by_name(library: torch.library.Library) -> None:
    gate = _define(library, "gate(Tensor x) -> Tensor", lambda x: x * 1.5)
    fill = _define(library, "fill(Tensor(a!) x) -> ()", lambda x: (x.fill_(0.1), None)[1])
    count = _define(library, "count(Tensor x) -> Tensor", lambda x: (x > 0).sum())
    note = _define(library, "note(Tensor x) -> int", lambda x: 3)
    for operation, call in ((gate, lambda: gate(X)), (fill, lambda: fill(X.clone()))):
        for run in (lambda call=call: disturbed(call, runs=1), lambda call=call: spread(lambda: {"x": call()}, FP32)):
            with pytest.raises(UnknownOperation) as caught:
                run()
            assert caught.value.name == f"{library.ns}::{operation._qualified_op_name.partition('::')[2]}"
            assert f'register("{caught.value.name}", Kind.ELEMENTWISE)' in str(caught.value)
    with Rounding(FP32, 0):
        assert count(X) == (X > 0).sum(), "integers do not round"
        assert note(X) == 3
    with pytest.raises(UnknownOperation, match="aten::linalg_qr"):
        disturbed(torch.linalg.qr, X, runs=1)
    with pytest.raises(UnknownOperation, match="no complex numbers"):
        disturbed(lambda x: x.to(torch.complex128) * 3, X, runs=1)


def test_registered_operations_round_as_they_are_said_to(library: torch.library.Library) -> None:
    gate = _define(library, "gate(Tensor x) -> Tensor", lambda x: x * 1.5)
    dots = _define(library, "dots(Tensor x, Tensor y) -> Tensor", lambda x, y: (x * y).sum(-1))
    name = f"{library.ns}::gate"
    register(name, Kind.ELEMENTWISE, roundings=3)
    register(dots, Kind.CONTRACTION)
    assert_scale(largest(gate, X), 3 * (X * 1.5).abs())
    assert_scale(largest(dots, X, Y, fmt=FORMATS["fp16"]), (X * Y).abs().sum(-1))
    register(gate.default, Kind.MOVEMENT)
    assert largest(gate, X).max() == 0
    register(name, decomposition=lambda x: x * 0.75 + x * 0.75)
    assert (largest(gate, X) > (X * 1.5).abs()).any()
    s = spread(lambda: {"y": gate(X)}, FP32)["y"]
    assert s is not None
    assert (s.deviation > 0).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "expected either a kind or a decomposition"),
        ({"kind": Kind.MOVEMENT, "decomposition": abs}, "expected either a kind or a decomposition"),
        ({"kind": Kind.ELEMENTWISE, "roundings": -1}, "roundings -1 must not be negative"),
        ({"kind": Kind.ELEMENTWISE, "roundings": math.nan}, "roundings nan must not be negative"),
    ],
)
def test_contradictory_registrations_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongUse, match="mylib::gate") as caught:
        register("mylib::gate", **given)
    assert message in str(caught.value)
    assert "mylib::gate" not in operations._registered


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
