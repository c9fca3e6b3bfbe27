"""Column- and row-parallel layers on ranks: outputs, gradients and initial values of one process, exactly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_ranks import Check, Linear, integers, linear_problems, run_world, same, traffic_of

from sharded.cut import piece
from sharded.linear import ColumnParallelLinear, RowParallelLinear
from sharded.parallel_linear import ParallelLinear
from sharded.process_groups import ProcessGroups, set_default
from sharded.sequence_parallel import finish_sequence_parallel_gradients

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "column": [{}, {"gather_output": True}, {"sequence_parallel": True}],
    "row": [{}, {"input_is_parallel": False}, {"sequence_parallel": True}],
}
LEADINGS = [((3,),), ((4, 2), (5, 1)), ((1,), (2,)), ((2, 1, 3),)]
SHAPES = [*itertools.product((1, 4, 5), (1, 3, 8), LEADINGS[:2], (True,)), (4, 8, LEADINGS[0], False)]
SHAPES += itertools.product((4, 5), (3, 8), LEADINGS[2:], (False,))
FROZEN = [(), ("input",), ("weight",), ("bias",), ("weight", "bias"), ("input", "weight"), ("input", "weight", "bias")]


def cases(kind: str) -> Iterator[Linear]:
    """Every variant with every other option, sizes that divide and do not, and a rank that owns nothing."""
    for variant in VARIANTS[kind]:
        base = Linear(kind, 4, 8, options=variant)
        for inputs, outputs, leading, transposed in SHAPES:
            yield replace(base, inputs=inputs, outputs=outputs, leading=leading, transposed=transposed)
        for main_grad, skip, call, bias in itertools.product((False, True), repeat=4):
            options = {**variant, "main_grad": main_grad, "skip_bias_add": skip, "bias": bias}
            yield replace(base, outputs=6, leading=LEADINGS[1], weight_at_call=call, options=options)
        for frozen, main_grad in itertools.product(FROZEN, (False, True)):
            yield replace(base, inputs=6, frozen=frozen, options={**variant, "main_grad": main_grad})
        for dtype, main_grad in itertools.product((torch.float32, torch.bfloat16, torch.float16), (False, True)):
            options = {**variant, "main_grad": main_grad}
            yield replace(base, inputs=5, dtype=dtype, leading=LEADINGS[1], transposed=True, options=options)
    yield Linear(kind, 3, 4, leading=((),))  # a single token, without a token dimension


def all_cases(group: dist.ProcessGroup, kind: str, explicit: bool) -> list[str]:
    problems = []
    for case in cases(kind):
        found = linear_problems(replace(case, explicit=explicit), group)
        problems += [f"{case}: {problem}" for problem in found]
    return problems


def traffic(group: dist.ProcessGroup) -> list[str]:
    """Exactly the collectives that the algebra needs."""
    n = group.size()
    lead, inputs, outputs = (2 * n, 3), 3 * n, 5 * n
    tokens, back = 6 * n, ("backward", 0)
    x_all, y_all = tokens * inputs, tokens * outputs
    column, row = Linear("column", inputs, outputs, (lead,)), Linear("row", inputs, outputs, (lead,))
    sp, gather = {"sequence_parallel": True}, {"gather_output": True}
    whole = {"input_is_parallel": False}
    table = [
        (column, {}, (), [back, ("allreduce", x_all)]),
        (column, {}, ("input",), [back]),
        (column, {}, ("weight",), [back, ("allreduce", x_all)]),
        (column, gather, (), [("allgather", y_all // n), back, ("allreduce", x_all)]),
        (column, gather, ("input",), [("allgather", y_all // n), back]),
        (column, sp, (), [("allgather", x_all // n), back, ("reduce", x_all), ("allgather", x_all // n)]),
        (column, sp, ("weight",), [("allgather", x_all // n), back, ("reduce", x_all)]),
        (column, sp, ("input",), [("allgather", x_all // n), back, ("allgather", x_all // n)]),
        (column, sp, ("input", "weight"), [("allgather", x_all // n), back]),
        (row, {}, (), [("allreduce", y_all), back]),
        (row, whole, (), [("allreduce", y_all), back, ("allgather", x_all // n)]),
        (row, whole, ("input",), [("allreduce", y_all), back]),
        (row, sp, (), [("reduce", y_all), back, ("allgather", y_all // n)]),
        (row, sp, ("input", "weight"), [("reduce", y_all), back]),
    ]
    problems = []
    for (case, options, frozen, expected), main_grad in itertools.product(table, (False, True)):
        case = replace(case, options={**options, "main_grad": main_grad}, frozen=frozen)
        found = traffic_of(case, group)
        wanted = expected if n > 1 else [back]
        if found != wanted:
            problems.append(f"{case}: {found}, expected {wanted}")
    return problems


def gathered(x: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, x.detach(), group=group)
    return everyone


def initialization(group: dist.ProcessGroup, alone: dist.ProcessGroup) -> list[str]:
    """``full``: the shards joined are one process' tensor, bit for bit. ``per_rank``: shards differ, replicas agree."""
    problems = []
    for kind, dtype, dim in itertools.product(("column", "row"), (torch.float64, torch.bfloat16), (0, 1)):
        if (kind == "column") != (dim == 0):
            continue
        case = Linear(kind, 7, 9, dtype=dtype)
        one = case.build(alone, seed=3)
        for init in ("full", "per_rank"):
            layer = case.build(group, seed=3, init=init)
            assert layer.weight is not None
            assert layer.bias is not None
            weights, biases = gathered(layer.weight, group), gathered(layer.bias, group)
            if init == "full":
                problems += same(f"{kind} weight", torch.cat(weights, dim), one.weight)
            elif any(torch.equal(a[:1, :1], b[:1, :1]) for a, b in itertools.combinations(weights, 2)):
                problems.append(f"{kind}: shards are alike")
            if kind == "row":
                problems += [p for b in biases for p in same("row bias", b, one.bias)]
            elif init == "full":
                problems += same("column bias", torch.cat(biases), one.bias)
        other = case.build(alone, seed=4)
        if torch.equal(other.weight, one.weight) or not one.bias.any() or one.weight.abs().max() > 7**-0.5:
            problems.append(f"{kind}: seeds are alike, the bias is zero or a weight is out of bounds")
    return problems


def main_grad_is_wide(group: dist.ProcessGroup) -> list[str]:
    """257 tokens of ones, twice: bf16 has no 257 and no 514, and products summed in it would stop at 256."""
    problems = []
    for kind, sp in itertools.product(("column", "row"), (False, True)):
        case = Linear(kind, 2, 2, dtype=torch.bfloat16, options={"main_grad": True, "sequence_parallel": sp})
        layer = case.build(group)
        tokens = 257
        rows = tokens if kind == "row" or not sp else piece(tokens, group.size(), group.rank())[1]
        length = {"sequence_length": tokens} if kind == "column" and sp else {}
        for _ in range(2):
            layer(torch.ones(rows, 2 if kind == "column" else 1, dtype=torch.bfloat16), **length).sum().backward()
        finish_sequence_parallel_gradients(layer.parameters(), group)
        for name, parameter in layer.named_parameters():
            problems += same(f"{kind} {name}", parameter.main_grad, torch.full_like(parameter.main_grad, 2 * tokens))
    return problems


def column_gradient_is_transposed(group: dist.ProcessGroup) -> list[str]:
    """torch's backward of a transposed input gives a transposed gradient: what mutant F06 needs in order to show."""
    x = integers("x", 4, 3).T.requires_grad_()
    seen = []
    weight = integers("w", 5, 4)
    entered = x.view_as(x)
    entered.register_hook(lambda grad: seen.append(grad.is_contiguous()))
    torch.nn.functional.linear(entered, weight).sum().backward()
    return [] if seen == [False] else [f"contiguous: {seen}"]


def refused(group: dist.ProcessGroup) -> list[str]:
    """Bad arguments, on every rank and before anything is sent."""
    n = group.size()
    row = RowParallelLinear(4, 4, group=group, sequence_parallel=True)
    no_weight = ColumnParallelLinear(3, 4, group=group, build_weight=False, main_grad=True)
    calls: list[tuple[Any, type[Exception], str]] = [
        (
            lambda: ColumnParallelLinear(3, 4, group=group, gather_output=True, sequence_parallel=True),
            ValueError,
            "expected one of them",
        ),
        (
            lambda: RowParallelLinear(3, 4, group=group, input_is_parallel=False, sequence_parallel=True),
            ValueError,
            "expected input_is_parallel=True",
        ),
        (lambda: ColumnParallelLinear(0, 4, group=group), ValueError, "in_features=0"),
        (lambda: ColumnParallelLinear(3, 4.0, group=group), TypeError, "out_features=4.0"),
        (lambda: ColumnParallelLinear(3, 4, group=object()), TypeError, "group="),
        (lambda: ColumnParallelLinear(3, 4, group=group, dtype=torch.int64), TypeError, "dtype=torch.int64"),
        (lambda: ColumnParallelLinear(3, 4, group=group, init="zeros"), ValueError, "init='zeros'"),
        (lambda: ColumnParallelLinear(3, 4, group=group, seed=None), TypeError, "seed=None"),
        (lambda: ColumnParallelLinear(3, 4, group=group)(torch.ones(2, 4)), ValueError, r"expected [..., 3]"),
        (lambda: row(torch.ones(row.weight.shape[1])), ValueError, "cuts the first dimension"),
        (lambda: no_weight(torch.ones(2, 3)), ValueError, "pass forward(x, weight)"),
        (lambda: no_weight(torch.ones(2, 3), torch.ones(5, 3)), ValueError, "expected (" + str(4 // n)),
        (
            lambda: no_weight(torch.ones(2, 3), torch.ones(4 // n, 3, requires_grad=True)),
            ValueError,
            "has no main_grad",
        ),
        (
            lambda: ColumnParallelLinear(3, 4, group=group, sequence_parallel=True)(
                torch.ones(9, 3), sequence_length=2
            ),
            ValueError,
            "has length 9: expected",
        ),
    ]
    problems = []
    for call, kind, message in calls:
        try:
            call()
        except kind as error:
            problems += [] if message in str(error) else [f"{message!r} is not in {error}"]
            continue
        problems.append(f"not refused: {message}")
    return problems


def no_default() -> list[str]:
    set_default(None)
    try:
        ParallelLinear(2, 2, 0, 0)
    except ValueError as error:
        return [] if "no default mesh" in str(error) else [str(error)]
    return ["not refused"]


def on_ranks() -> Mapping[str, Check]:
    n = dist.get_world_size()
    axes = [("tp", 2), ("dp", n // 2)]
    groups, single = ProcessGroups(axes), ProcessGroups([("tp", n)])
    set_default(groups)
    tp, dp, everyone, alone = groups.group("tp"), groups.group("dp"), single.group("tp"), groups.group("pp")
    checks: dict[str, Check] = {}
    for kind in ("column", "row"):
        checks[f"{kind}, default group"] = lambda kind=kind: all_cases(tp, kind, explicit=False)
        if n == 4:
            checks[f"{kind}, dp group"] = lambda kind=kind: all_cases(dp, kind, explicit=True)
            checks[f"{kind}, another mesh"] = lambda kind=kind: all_cases(everyone, kind, explicit=True)
        else:
            checks[f"{kind}, alone"] = lambda kind=kind: all_cases(alone, kind, explicit=True)
    checks["traffic"] = lambda: traffic(everyone)
    checks["traffic alone"] = lambda: traffic(alone)
    checks["initialization"] = lambda: initialization(everyone, alone)
    checks["main_grad"] = lambda: main_grad_is_wide(tp)
    checks["transposed gradient"] = lambda: column_gradient_is_transposed(tp)
    checks["refused"] = lambda: refused(tp)
    checks["no default"] = no_default
    return checks


@pytest.mark.parametrize("world", [2, 4])
def test_layers_on_ranks(world: int) -> None:
    found = run_world(world, on_ranks)
    wrong = {name: problems[:5] for name, problems in found.items() if problems}
    assert not wrong, wrong
