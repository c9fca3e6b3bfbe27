"""Vocabulary-parallel cross entropy on ranks: loss and gradients of one process, its traffic, and what it refuses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from sharded_ranks import Check, Traffic, integers, piece_of, run_world, same, strided

from sharded.cross_entropy import vocab_parallel_cross_entropy
from sharded.linear_cross_entropy import linear_cross_entropy
from sharded.main_grad import attach
from sharded.process_groups import ProcessGroups, set_default

IGNORED = -100
#: How far a result may be off, relative to the largest value: fp32 inside, and the rounding of the gradient.
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Loss:
    """One loss; ``padding`` columns after the vocabulary hold ``garbage``."""

    vocabulary: int = 10
    padding: int = 0
    leading: tuple[int, ...] = (4, 3)
    dtype: torch.dtype = torch.float64
    scale: float = 1.0
    ignored: tuple[int, ...] = ()
    garbage: float = 1e4
    transposed: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def logits(self, data: str) -> torch.Tensor:
        """Of the whole width, representable in the dtype."""
        x = integers(data, *self.leading, self.vocabulary) * 0.75 * self.scale
        return torch.cat([x, torch.full((*self.leading, self.padding), self.garbage)], -1).to(self.dtype).double()

    def targets(self, data: str) -> torch.Tensor:
        t = integers(f"{data} t", math.prod(self.leading)).long().abs().cumsum(0) % self.vocabulary
        t[list(self.ignored)] = IGNORED
        return t.view(self.leading)

    def options_for(self, group: dist.ProcessGroup) -> dict[str, Any]:
        columns = self.vocabulary + self.padding
        return {"group": group, "vocabulary": self.vocabulary, "columns": columns, **self.options}


def right(case: Loss, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The loss of one process, by torch in float64."""
    x = x[..., : case.vocabulary].flatten(0, -2)
    reduction, alpha = case.options.get("reduction", "none"), case.options.get("label_smoothing", 0.0)
    if case.options.get("smoothing") == "megatron":
        alpha *= case.vocabulary / (case.vocabulary - 1)
    valid = t.flatten() != IGNORED
    log_z = x.logsumexp(-1)
    loss = F.cross_entropy(x, t.flatten(), label_smoothing=alpha, ignore_index=IGNORED, reduction="none")
    loss = loss + torch.where(valid, case.options.get("z_loss", 0.0) * log_z.square(), 0.0)
    if reduction == "none":
        return loss.view(t.shape)
    return loss.sum() / (max(1, int(valid.sum())) if reduction == "mean" else 1)


def near(name: str, found: torch.Tensor | None, expected: torch.Tensor, dtype: torch.dtype) -> list[str]:
    if found is None or found.shape != expected.shape:
        return [f"{name} is {found}, expected shape {tuple(expected.shape)}"]
    limit = ROUNDING[dtype] * max(1.0, _largest(expected))
    off = (found.detach().double() - expected.double()).abs()
    return [] if bool((off <= limit).all()) else [f"{name} is {found.tolist()}, expected {expected.tolist()}"]


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def problems_of(case: Loss, group: dist.ProcessGroup) -> list[str]:
    """What differs from one process: the loss, the gradient; logits that changed; a second backward."""
    data = f"replica {dist.get_process_group_ranks(group)}"
    whole, t = case.logits(data).requires_grad_(), case.targets(data)
    expected = right(case, whole, t)
    g = integers(f"{data} g", *expected.shape) + 0.5
    expected.backward(g)
    assert whole.grad is not None
    own = piece_of(whole.detach(), -1, group)
    own = (strided(own) if case.transposed else own.contiguous()).to(case.dtype).clone().requires_grad_()
    before = own.detach().clone()
    wide = torch.promote_types(case.dtype, torch.float32)
    loss = vocab_parallel_cross_entropy(own, t, **case.options_for(group))
    problems = near("loss", loss, expected.detach(), wide)
    problems += [] if loss.dtype == wide else [f"loss is {loss.dtype}, expected {wide}"]
    loss.backward(g.to(wide), retain_graph=True)
    assert own.grad is not None
    problems += near("gradient", own.grad, piece_of(whole.grad, -1, group), case.dtype)
    first, own.grad = own.grad, None
    loss.backward(g.to(wide))
    return (
        problems
        + same("second gradient", own.grad, first)
        + same("logits after", own.nan_to_num(), before.nan_to_num())
    )


def cases() -> Iterator[Loss]:
    """Every option with others, sizes that divide and do not, and ranks without a column of the vocabulary."""
    for vocabulary, padding, transposed in itertools.product((1, 2, 3, 8, 9), (0, 1, 5), (False, True)):
        yield Loss(vocabulary, padding, transposed=transposed)
        yield Loss(vocabulary, padding, leading=(5,), dtype=torch.float32)
    for reduction, ignored, z_loss in itertools.product(("none", "mean", "sum"), ((), (0, 5), range(12)), (0.0, 0.1)):
        options = {"reduction": reduction, "z_loss": z_loss}
        yield Loss(ignored=tuple(ignored), options=options)
        for smoothing, padding in itertools.product(("torch", "megatron"), (0, 3)):
            smooth = {**options, "label_smoothing": 0.3, "smoothing": smoothing}
            yield Loss(padding=padding, ignored=tuple(ignored), options=smooth)
    for dtype, scale, transposed in itertools.product(ROUNDING, (1.0, 1000.0), (False, True)):
        for options in ({}, {"label_smoothing": 0.1}, {"reduction": "mean", "z_loss": 1e-4}):
            yield Loss(padding=2, dtype=dtype, scale=scale, transposed=transposed, options=options)
    yield Loss(padding=3, garbage=math.inf)
    yield Loss(padding=3, garbage=math.nan, dtype=torch.bfloat16, options={"label_smoothing": 0.1})


def all_cases(group: dist.ProcessGroup) -> list[str]:
    return [f"{case}: {problem}" for case in cases() for problem in problems_of(case, group)]


def ignored_garbage(group: dist.ProcessGroup) -> list[str]:
    """An ignored token has no part in anything, whatever its logits are."""
    case, problems = Loss(leading=(3,), ignored=(1,)), []
    x, t = case.logits("x"), case.targets("x")
    for garbage, reduction in itertools.product((math.nan, math.inf, -math.inf), ("none", "mean", "sum")):
        x[1] = garbage
        own = piece_of(x, -1, group).clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(own, t, group=group, columns=10, reduction=reduction)
        loss.sum().backward()
        assert own.grad is not None
        if not loss.isfinite().all() or not own.grad.isfinite().all() or own.grad[1].any():
            problems.append(f"{garbage} {reduction}: {loss.tolist()}, {own.grad.tolist()}")
    return problems


def large_logits(group: dist.ProcessGroup) -> list[str]:
    """Finite however large they are, on whichever rank the maximum is; a sum of exponentials alone is not."""
    problems = []
    for at in range(group.size()):
        x = torch.zeros(2, 2 * group.size())
        x[:, 2 * at] = 1e30
        loss = vocab_parallel_cross_entropy(
            piece_of(x, -1, group).contiguous(), torch.tensor([2 * at, 2 * at + 1]), group=group
        )
        if loss.tolist() != [0.0, torch.tensor(1e30).item()]:
            problems.append(f"maximum at {at}: {loss.tolist()}")
    return problems


def traffic(group: dist.ProcessGroup) -> list[str]:
    """Three all-reduces of T forward, whatever the options; none backward."""
    n, problems = group.size(), []
    for options in (
        {},
        {"label_smoothing": 0.1},
        {"reduction": "mean", "z_loss": 0.1},
        {"label_smoothing": 0.1, "smoothing": "megatron", "reduction": "sum"},
    ):
        x = torch.ones(5, 2, 3, requires_grad=True)
        with Traffic() as seen:
            loss = vocab_parallel_cross_entropy(x, torch.zeros(5, 2, dtype=torch.int64), group=group, **options)
            seen.calls.append(("backward", 0))
            loss.sum().backward()
        wanted = [*[("allreduce", 10)] * (3 if n > 1 else 0), ("backward", 0)]
        problems += [] if seen.calls == wanted else [f"{options}: {seen.calls}, expected {wanted}"]
    return problems


def with_output_layer(group: dist.ProcessGroup) -> list[str]:
    """Hidden states to loss: gradients of one process, tied or with a main gradient, and one all-reduce T x H more."""
    problems = []
    for main_grad, options in itertools.product((False, True), ({}, {"reduction": "mean", "label_smoothing": 0.2})):
        case = Loss(vocabulary=9, padding=1, leading=(4, 2), options=options)
        h, w = integers("h", 4, 2, 6).requires_grad_(), integers("w", 10, 6).requires_grad_()
        t = case.targets("output layer")
        expected = right(case, h @ w.T, t)
        expected.sum().backward()
        assert h.grad is not None
        assert w.grad is not None
        own = torch.nn.Parameter(piece_of(w.detach(), 0, group).clone())
        x = h.detach().clone().requires_grad_()
        if main_grad:
            attach(own)
        with Traffic() as seen:
            loss = linear_cross_entropy(x, own, t, **case.options_for(group))
            seen.calls.append(("backward", 0))
            loss.sum().backward()
        problems += near("loss", loss, expected.detach(), torch.float64)
        problems += near("hidden gradient", x.grad, h.grad, torch.float64)
        grad = own.main_grad if main_grad else own.grad
        problems += near("weight gradient", grad, piece_of(w.grad, 0, group), torch.float64)
        problems += same("grad beside main_grad", own.grad, None) if main_grad else []
        wanted = [*[("allreduce", 8)] * 3, ("backward", 0), ("allreduce", 8 * 6)]
        wanted = wanted if group.size() > 1 else [("backward", 0)]
        problems += [] if seen.calls == wanted else [f"{seen.calls}, expected {wanted}"]
    return problems


def refused(group: dist.ProcessGroup) -> list[str]:
    """Bad arguments, on every rank, with its message and before anything is sent."""
    n = group.size()
    x, t = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)

    def wrong_target(value: int) -> torch.Tensor:
        return torch.tensor([0, 1, value, 0])

    calls: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"targets": wrong_target(-1)}, ValueError, "target -1 is out of range: expected from 0 to"),
        ({"targets": wrong_target(3 * n)}, ValueError, f"target {3 * n} is out of range"),
        ({"targets": wrong_target(3 * n - 1), "vocabulary": 3 * n - 1}, ValueError, f"target {3 * n - 1} is out"),
        ({"targets": wrong_target(-100), "ignore_index": 0}, ValueError, "target -100 is out of range"),
        ({"targets": t.float()}, TypeError, "targets of dtype torch.float32"),
        ({"targets": t[:3]}, ValueError, "targets of shape (3,): expected (4,)"),
        ({"logits": x.long()}, TypeError, "logits of dtype torch.int64"),
        ({"logits": x.sum()}, TypeError, "at least one dimension"),
        ({"columns": 3 * n + n}, ValueError, "have 3 columns: expected 4, piece"),
        ({"vocabulary": 3 * n + 1}, ValueError, f"vocabulary={3 * n + 1} in {3 * n} columns"),
        ({"vocabulary": 0}, ValueError, "vocabulary=0"),
        ({"reduction": "max"}, ValueError, "reduction='max': expected one of none, mean, sum"),
        ({"smoothing": "other"}, ValueError, "smoothing='other': expected one of torch, megatron"),
        ({"label_smoothing": 1.0}, ValueError, "label_smoothing=1.0"),
        ({"label_smoothing": -0.1}, ValueError, "label_smoothing=-0.1"),
        ({"label_smoothing": math.nan}, ValueError, "label_smoothing=nan"),
        ({"label_smoothing": 0.1, "smoothing": "megatron", "vocabulary": 1}, ValueError, "there are none"),
        ({"z_loss": -1.0}, ValueError, "z_loss=-1.0"),
        ({"z_loss": math.inf}, ValueError, "z_loss=inf"),
        ({"group": object()}, TypeError, "group=<object"),
    ]
    problems = []
    for changes, kind, message in calls:
        with Traffic() as seen:
            try:
                arguments = {"logits": x, "targets": t, "group": group, **changes}
                vocab_parallel_cross_entropy(**arguments)
                problems.append(f"not refused: {message}")
            except kind as error:
                problems += [] if message in str(error) else [f"{message!r} is not in {error}"]
        problems += [f"sent before it was refused: {message}"] if seen.calls else []
    try:
        linear_cross_entropy(torch.zeros(4, 5), torch.zeros(3, 6), t, group=group)
        problems.append("not refused: a hidden size that does not fit")
    except ValueError as error:
        problems += [] if "expected [T, H] and [w, H]" in str(error) else [str(error)]
    return problems


def default_mesh() -> list[str]:
    set_default(None)
    try:
        vocab_parallel_cross_entropy(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    except ValueError as error:
        return [] if "no default mesh" in str(error) else [str(error)]
    return ["not refused"]


def int32_targets(group: dist.ProcessGroup) -> list[str]:
    x, t = torch.arange(6.0).view(2, 3), torch.tensor([1, 0])
    wide, narrow = (vocab_parallel_cross_entropy(x, one, group=group) for one in (t, t.to(torch.int32)))
    return same("loss", narrow, wide)


def on_ranks() -> Mapping[str, Check]:
    n = dist.get_world_size()
    groups, single = ProcessGroups([("tp", 2), ("dp", n // 2)]), ProcessGroups([("tp", n)])
    set_default(groups)
    everyone, alone = single.group("tp"), groups.group("pp")
    checks: dict[str, Check] = {"tp": lambda: all_cases(groups.group("tp")), "everyone": lambda: all_cases(everyone)}
    checks["alone"] = lambda: all_cases(alone)
    for check in (ignored_garbage, large_logits, traffic, with_output_layer, refused, int32_targets):
        checks[check.__name__] = lambda check=check: check(everyone)
        checks[f"{check.__name__} alone"] = lambda check=check: check(alone)
    checks["default mesh"] = default_mesh
    return checks


@pytest.mark.parametrize("world", [2, 4])
def test_cross_entropy_on_ranks(world: int) -> None:
    found = run_world(world, on_ranks)
    wrong = {name: problems[:5] for name, problems in found.items() if problems}
    assert not wrong, wrong
