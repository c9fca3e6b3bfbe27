"""The vocabulary-parallel embedding on ranks: outputs, gradient and initial table of one process, exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from sharded_ranks import Check, Traffic, integers, piece_of, run_world, same, strided

from sharded.embedding import VocabParallelEmbedding
from sharded.process_groups import ProcessGroups, set_default


@dataclass(frozen=True)
class Table:
    """One embedding driven forward and backward."""

    vocabulary: int = 8
    hidden: int = 3
    leading: tuple[tuple[int, ...], ...] = ((4, 2),)
    dtype: torch.dtype = torch.float64
    transposed: bool = False
    explicit: bool = True
    frozen: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, group: dist.ProcessGroup, **more: Any) -> VocabParallelEmbedding:
        options = {**self.options, "dtype": self.dtype, **({"group": group} if self.explicit else {}), **more}
        return VocabParallelEmbedding(self.vocabulary, self.hidden, **options)

    @property
    def sequence(self) -> bool:
        return bool(self.options.get("sequence_parallel"))


def ids_of(name: str, vocabulary: int, *shape: int) -> torch.Tensor:
    return integers(name, *shape).long().flatten().cumsum(0).remainder(vocabulary).view(shape)


def problems_of(case: Table, group: dist.ProcessGroup) -> list[str]:
    """What differs from one process in float64."""
    data = f"replica {dist.get_process_group_ranks(group)}"
    layer = case.build(group)
    whole = integers("table", layer.rows, case.hidden).requires_grad_()
    layer.weight.requires_grad_(not case.frozen)
    with torch.no_grad():
        layer.weight.copy_(piece_of(whole, 0, group))
    problems: list[str] = []
    for m, lead in enumerate(case.leading):
        ids = ids_of(f"{data} ids{m}", case.vocabulary, *lead)
        ids = strided(ids) if case.transposed else ids
        y = F.embedding(ids, whole, padding_idx=case.options.get("padding_idx"))
        g = integers(f"{data} g{m}", *y.shape)
        y.backward(g)

        def leaving(x: torch.Tensor) -> torch.Tensor:
            x = piece_of(x, 0, group) if case.sequence else x
            return strided(x) if case.transposed else x

        own_g, before = leaving(g).to(case.dtype).clone(), ids.clone()
        out = layer(ids)
        problems += same(f"output {m}", out, leaving(y))
        problems += [] if out.dtype == case.dtype else [f"output {m} is {out.dtype}"]
        if not case.frozen:
            out.backward(own_g)
        problems += same(f"ids {m} after", ids, before)
    expected = None if case.frozen else piece_of(whole.grad, 0, group)  # type: ignore[arg-type]
    if case.options.get("main_grad"):
        buffer = layer.weight.main_grad
        wide = torch.promote_types(case.dtype, torch.float32)
        problems += same("grad", layer.weight.grad, None)
        problems += [] if buffer.dtype == wide else [f"main_grad is {buffer.dtype}"]
        return problems + same("main_grad", buffer, torch.zeros_like(buffer) if expected is None else expected)
    return problems + same("grad", layer.weight.grad, expected)


def cases() -> Iterator[Table]:
    """Options with each other, tables that divide and do not, and sequences shorter than the group."""
    for sp, main_grad in itertools.product((False, True), repeat=2):
        base = Table(options={"sequence_parallel": sp, "main_grad": main_grad})
        for vocabulary, divisible_by, padding_idx in itertools.product((4, 5, 11), (1, 4, 7), (None, 0, 3)):
            options = {**base.options, "divisible_by": divisible_by, "padding_idx": padding_idx}
            yield replace(base, vocabulary=vocabulary, options=options)
        for leading, transposed in itertools.product([((1,),), ((5, 2), (3, 1)), ((2, 1, 3),)], (False, True)):
            yield replace(base, leading=leading, transposed=transposed)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield replace(base, dtype=dtype, leading=((6,), (2,)))
        yield replace(base, frozen=True)


def all_cases(group: dist.ProcessGroup, explicit: bool = True) -> list[str]:
    return [
        f"{case}: {problem}" for case in cases() for problem in problems_of(replace(case, explicit=explicit), group)
    ]


def traffic(group: dist.ProcessGroup) -> list[str]:
    """One all-reduce T x H, or one reduce-scatter forward and one all-gather backward."""
    n, hidden = group.size(), 3
    tokens, back = 6 * n, ("backward", 0)
    table: list[tuple[Table, list[tuple[str, int]]]] = [
        (Table(), [("allreduce", tokens * hidden), back]),
        (
            Table(options={"sequence_parallel": True}),
            [("reduce", tokens * hidden), back, ("allgather", tokens * hidden // n)],
        ),
    ]
    problems = []
    for (case, expected), main_grad in itertools.product(table, (False, True)):
        layer = case.build(group, main_grad=main_grad)
        with Traffic() as seen:
            y = layer(torch.zeros(2 * n, 3, dtype=torch.int64))
            seen.calls.append(back)
            y.sum().backward()
        wanted = expected if n > 1 else [back]
        problems += [] if seen.calls == wanted else [f"{case}: {seen.calls}, expected {wanted}"]
    return problems


def initialization(group: dist.ProcessGroup, alone: dist.ProcessGroup) -> list[str]:
    """``full``: the shards joined are one process' table, bit for bit. ``per_rank``: shards differ. Padding is zero."""
    problems = []
    for dtype, vocabulary in itertools.product((torch.float64, torch.bfloat16), (9, 12)):
        options = {"divisible_by": 7, "padding_idx": 4}
        case = Table(vocabulary, 5, dtype=dtype, options=options)
        one = case.build(alone, seed=3).weight
        joined = torch.cat(gathered(case.build(group, seed=3).weight, group))
        problems += same("table", joined, one)
        if joined[vocabulary:].any() or joined[4].any() or not joined[:4].all() or not joined[5:vocabulary].all():
            problems.append(f"zeros: {joined.tolist()}")
        shards = gathered(case.build(group, seed=3, init="per_rank").weight, group)
        if any(torch.equal(a[:2], b[:2]) for a, b in itertools.combinations(shards, 2)):
            problems.append("per_rank: shards are alike")
        if torch.cat(shards)[vocabulary:].any() or torch.cat(shards)[4].any():
            problems.append("per_rank: padding is not zero")
        other = case.build(alone, seed=4).weight
        if torch.equal(other, one) or one.abs().max() > 1 / math.sqrt(5):
            problems.append("seeds are alike, or a value is out of bounds")
    return problems


def gathered(x: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, x.detach(), group=group)
    return everyone


def backward_repeats(group: dist.ProcessGroup) -> list[str]:
    """Many tokens of few rows, whose sum depends on the order: the same bits every time, and with another stride."""
    problems = []
    for dtype, main_grad in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        case = Table(4, 5, dtype=dtype, options={"main_grad": main_grad})
        ids = torch.arange(5000).remainder(4).view(50, 100)
        stream = torch.Generator().manual_seed(1)
        g = torch.randn(50, 100, 5, generator=stream).to(dtype)
        grads = []
        for gradient in (g, g, strided(g)):
            layer = case.build(group)
            layer(ids).backward(gradient)
            grads.append(layer.weight.main_grad if main_grad else layer.weight.grad)
        for again in grads[1:]:
            problems += same(f"{dtype} {main_grad} again", again, grads[0])
    return problems


def gradient_is_summed_in_fp32(group: dist.ProcessGroup) -> list[str]:
    """257 and 259 tokens of one row: bf16 has neither, and rounds to 256 and 260. A sum in it would stop at 256."""
    problems = []
    for main_grad, expected in ((False, 256.0), (True, 514.0)):
        layer = Table(4, 2, dtype=torch.bfloat16, options={"main_grad": main_grad}).build(group)
        for _ in range(2 if main_grad else 1):
            layer(torch.zeros(257, dtype=torch.int64)).backward(torch.ones(257, 2, dtype=torch.bfloat16))
        if group.rank() == 0:
            grad = layer.weight.main_grad if main_grad else layer.weight.grad
            problems += same("row 0", grad[0], torch.full((2,), expected))  # type: ignore[index]
    layer = Table(4, 2, dtype=torch.bfloat16).build(group)
    layer(torch.zeros(259, dtype=torch.int64)).backward(torch.ones(259, 2, dtype=torch.bfloat16))
    if group.rank() == 0:
        problems += same("row 0", layer.weight.grad[0], torch.full((2,), 260.0))  # type: ignore[index]
    return problems


def refused(group: dist.ProcessGroup) -> list[str]:
    """Bad arguments and ids, on every rank and before anything is sent."""
    n = group.size()
    layer = VocabParallelEmbedding(2 * n + 1, 3, group=group, divisible_by=4 * n)

    def ids(value: int) -> torch.Tensor:
        return torch.tensor([[0, value], [1, 1]])

    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: VocabParallelEmbedding(n, 0, group=group), ValueError, "embedding_dim=0: expected an int of at least"),
        (lambda: VocabParallelEmbedding(8.0, 3, group=group), TypeError, "num_embeddings=8.0"),  # type: ignore[arg-type]
        (lambda: VocabParallelEmbedding(True, 3, group=group), TypeError, "num_embeddings=True"),
        (lambda: VocabParallelEmbedding(8, 3, group=group, divisible_by=0), ValueError, "divisible_by=0"),
        (lambda: VocabParallelEmbedding(8, 3, group=group, padding_idx=8), ValueError, "padding_idx=8: expected"),
        (lambda: VocabParallelEmbedding(8, 3, group=group, padding_idx=-1), ValueError, "padding_idx=-1"),
        (lambda: VocabParallelEmbedding(8, 3, group=object()), TypeError, "group=<object"),  # type: ignore[arg-type]
        (lambda: VocabParallelEmbedding(8, 3, group=group, dtype=torch.int32), TypeError, "dtype=torch.int32"),
        (lambda: VocabParallelEmbedding(8, 3, group=group, init="zeros"), ValueError, "init='zeros'"),  # type: ignore[arg-type]
        (lambda: layer(ids(-1)), ValueError, f"token -1 is out of range: expected ids from 0 to {2 * n}"),
        (lambda: layer(ids(2 * n + 1)), ValueError, f"token {2 * n + 1} is out of range"),  # a row of the padding
        (lambda: layer(ids(4 * n)), ValueError, f"token {4 * n} is out of range"),
        (lambda: layer(ids(0).float()), TypeError, "ids of dtype torch.float32"),
        (lambda: layer(ids(0)[0, 0]), TypeError, "at least one dimension"),
    ]
    if n > 1:
        few = lambda: VocabParallelEmbedding(n - 1, 3, group=group)  # noqa: E731
        calls.append((few, ValueError, f"num_embeddings={n - 1} on a group of {n} ranks"))
    problems = []
    for call, kind, message in calls:
        with Traffic() as seen:
            try:
                call()
                problems.append(f"not refused: {message}")
            except kind as error:
                problems += [] if message in str(error) else [f"{message!r} is not in {error}"]
        problems += [f"sent before it was refused: {message}"] if seen.calls else []
    good = layer(ids(2 * n).to(torch.int32))  # the last token, and another dtype of ids
    return problems + ([] if good.shape == (2, 2, 3) else [f"{good.shape}"])


def no_default() -> list[str]:
    set_default(None)
    try:
        VocabParallelEmbedding(8, 3)
    except ValueError as error:
        return [] if "no default mesh" in str(error) else [str(error)]
    return ["not refused"]


def on_ranks() -> Mapping[str, Check]:
    n = dist.get_world_size()
    groups, single = ProcessGroups([("tp", 2), ("dp", n // 2)]), ProcessGroups([("tp", n)])
    set_default(groups)
    tp, everyone, alone = groups.group("tp"), single.group("tp"), groups.group("pp")
    checks: dict[str, Check] = {
        "default group": lambda: all_cases(tp, explicit=False),
        "everyone": lambda: all_cases(everyone),
        "alone": lambda: all_cases(alone),
        "initialization": lambda: initialization(everyone, alone),
    }
    for check in (traffic, backward_repeats, gradient_is_summed_in_fp32, refused):
        checks[check.__name__] = lambda check=check: check(everyone)
        checks[f"{check.__name__} alone"] = lambda check=check: check(alone)
    checks["no default"] = no_default
    return checks


@pytest.mark.parametrize("world", [2, 4])
def test_embeddings_on_ranks(world: int) -> None:
    found = run_world(world, on_ranks)
    wrong = {name: problems[:5] for name, problems in found.items() if problems}
    assert not wrong, wrong
