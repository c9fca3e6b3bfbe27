"""The transformer layer on ranks: outputs and all gradients of one process, and exactly the collectives it needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_blocks import Block, block_problems, block_traffic, cuts, names_of, own
from sharded_ranks import Check, Traffic, run_world, same

from sharded.linear import ColumnParallelLinear
from sharded.process_groups import ProcessGroups
from sharded.transformer import TransformerLayer


def cases() -> Iterator[Block]:
    base = Block()
    for kv_heads, norm, sp in itertools.product((4, 2, 1), ("layer", "rms"), (False, True)):
        options = {"norm": norm, "sequence_parallel": sp}
        yield replace(base, kv_heads=kv_heads, options=options)
        yield replace(base, kv_heads=kv_heads, options={**options, "qk_norm": True, "rotary": True})
    for mask, activation, bias in itertools.product(("causal", "padding", "none"), ("gelu", "swiglu"), (True, False)):
        yield replace(base, mask=mask, options={"activation": activation, "bias": bias})
    for sp, main_grad, frozen in itertools.product((False, True), repeat=3):
        options = {"sequence_parallel": sp, "main_grad": main_grad, "activation": "swiglu", "qk_norm": True}
        yield replace(base, kv_heads=2, frozen_input=frozen, mask="padding", options=options)
    for recompute, sp in itertools.product(("none", "selective", "full"), (False, True)):
        options = {"recompute": recompute, "sequence_parallel": sp, "activation": "swiglu", "main_grad": sp}
        yield replace(base, kv_heads=2, mask="padding", options=options)
        yield replace(base, kv_heads=2, frozen_input=True, options=options)
        for p, q in ((0.5, 0.1), (0.0, 0.5), (0.1, 0.0)):
            dropout = {"attention_dropout": p, "hidden_dropout": q}
            yield replace(base, kv_heads=1, options={**options, **dropout})
    yield replace(base, hidden=24, heads=8, kv_heads=4, ffn=8, options={"rotary": False, "qk_norm": True})


def all_cases(group: dist.ProcessGroup) -> list[str]:
    return [f"{case}: {problem}" for case in cases() for problem in block_problems(case, group)]


def low_precision(group: dist.ProcessGroup) -> list[str]:
    """Within a few roundings of the dtype, norms and softmax included; gradients in fp32 where asked for."""
    problems = []
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)):
        for sp in (False, True):
            options = {"sequence_parallel": sp, "main_grad": sp, "qk_norm": True, "rotary": True}
            case = Block(kv_heads=1, dtype=dtype, options=options)
            problems += [f"{case}: {problem}" for problem in block_problems(case, group, rtol)]
            for name, parameter in case.build(group).named_parameters():
                if sp and parameter.main_grad.dtype != torch.float32:
                    problems.append(f"{name}.main_grad is {parameter.main_grad.dtype}")
    return problems


def traffic(group: dist.ProcessGroup) -> list[str]:
    """Exactly the collectives that the algebra needs, in each way of recomputing."""
    n = group.size()
    case = Block(hidden=16, heads=4, ffn=12, batches=((2 * n, 3),))
    whole, own = 2 * n * 3 * 16, 2 * 3 * 16
    back, finish = ("backward", 0), ("finish", 0)
    reduced, again = ("allreduce", whole), ("allgather", own)
    half = [("allgather", own), ("reduce", whole)]
    plain = ([reduced] * 2, [reduced] * 2)
    sequence = (half * 2, [*half[:1], *half[1:], again] * 2)
    vectors = 2 * 2 * 16 + 2 * 16  # two norms of weight and bias, two biases of row layers
    shared = max(n, 2) // 2  # ranks that hold the same one of two key/value heads
    table = [({}, 4, plain, []), ({"sequence_parallel": True}, 4, sequence, [("allreduce", vectors)])]
    table += [
        ({"activation": "swiglu", "norm": "rms"}, 4, plain, []),
        ({"qk_norm": True}, 4, plain, [("allreduce", 8)]),
    ]
    heads = [("allreduce", 2 * 2 * 4 * (16 + 1))] if shared > 1 else []
    table += [({}, 2, plain, heads), ({"sequence_parallel": True}, 2, sequence, [("allreduce", vectors), *heads])]
    problems = []
    for (options, kv_heads, (forward, backward), completing), recompute in itertools.product(
        table, ("none", "selective", "full")
    ):
        for frozen in (False, True):
            asked = {**options, "recompute": recompute, "main_grad": frozen}
            this = replace(case, kv_heads=kv_heads, frozen_input=frozen, options=asked)
            repeated = forward if recompute == "full" else []
            wanted = [*forward, back, *repeated, *backward, finish, *completing] if n > 1 else [back, finish]
            found = block_traffic(this, group)
            problems += [f"{this}: {found}, expected {wanted}"] if found != wanted else []
    return problems


def initialization(group: dist.ProcessGroup, alone: dist.ProcessGroup) -> list[str]:
    """``full``: the shards joined are one process' parameters, bit for bit. No two parameters have the same numbers,
    and neither have those of another rank unless it holds the same heads."""
    problems = []
    for kv_heads, init in itertools.product((4, 1), ("full", "per_rank")):
        case = Block(kv_heads=kv_heads, ffn=16, options={"activation": "swiglu", "qk_norm": True})
        one = names_of(case.build(alone, seed=3))
        held = names_of(case.build(group, seed=3, init=init))
        first: list[Any] = [{name: parameter.detach() for name, parameter in held.items()}]
        dist.broadcast_object_list(first, group=group, group_src=0)
        for name, parameter in held.items():
            if init == "full":
                problems += same(name, parameter, own(case, name, one[name], group))
            dim, copies = cuts(case, name, group.size())
            alike = dim is None or group.rank() // copies == 0
            if torch.equal(parameter, first[0][name]) != alike:
                problems.append(f"{init}: {name} is {'not ' * alike}as on rank 0")
        drawn = [parameter.flatten()[:2].tolist() for name, parameter in held.items() if "norm" not in name]
        problems += [f"{init}: parameters are alike"] * any(drawn.count(numbers) > 1 for numbers in drawn)
    return problems


def refused(group: dist.ProcessGroup) -> list[str]:
    """On every rank, with the numbers and the rule, and before anything is sent."""
    n = group.size()
    mask = torch.ones(2, 4 * n, dtype=torch.bool)
    none_seen = mask.clone()
    none_seen[1] = False

    def build(hidden: int = 12 * n, heads: int = 2 * n, ffn: int = 4 * n, **options: Any) -> TransformerLayer:
        return TransformerLayer(hidden, heads, ffn, group=group, **options)

    def call(*shape: int, sequence_parallel: bool = True, **options: Any) -> torch.Tensor:
        return build(sequence_parallel=sequence_parallel)(torch.ones(*shape), **options)

    wide = 12 * n
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: build(heads=n + 1, hidden=12 * (n + 1)), ValueError, f"heads={n + 1} over {n} ranks: expected"),
        (lambda: build(hidden=12 * n + 1), ValueError, f"hidden={12 * n + 1} with heads={2 * n}: expected"),
        (lambda: build(ffn=4 * n + 1), ValueError, f"ffn={4 * n + 1} over {n} ranks: expected"),
        (lambda: build(heads=0), ValueError, "heads=0: expected at least 1"),
        (lambda: build(kv_heads=n + 1), ValueError, f"heads={2 * n} with kv_heads={n + 1}: expected"),
        (lambda: build(heads=3 * n, kv_heads=3), ValueError, f"kv_heads=3 over {n} ranks: expected"),
        (lambda: build(hidden=6 * n, rotary=True), ValueError, "rotary embedding on heads of width 3: expected"),
        (lambda: build(attention_dropout=1.0), ValueError, "attention_dropout=1.0: expected"),
        (lambda: build(hidden_dropout=-0.1), ValueError, "hidden_dropout=-0.1: expected"),
        (lambda: build(norm="batch"), ValueError, "norm='batch': expected one of layer, rms"),
        (lambda: build(activation="relu"), ValueError, "activation='relu': expected one of gelu, swiglu"),
        (lambda: build(recompute="some"), ValueError, "recompute='some': expected one of none, selective, full"),
        (lambda: call(4, 2, wide, sequence_length=4 * n + 1), ValueError, f"sequence_length={4 * n + 1} over {n}"),
        (lambda: call(4, 2, wide, sequence_length=5 * n), ValueError, "has 4 positions: expected 5"),
        (lambda: call(4, 2, wide, sequence_parallel=False, sequence_length=5), ValueError, "has 4 positions: exp"),
        (lambda: call(4, wide), ValueError, f"expected [positions, sequences, {wide}]"),
        (lambda: call(4, 2, wide, mask="padding"), TypeError, "the mask is 'padding': expected None, 'causal' or"),
        (lambda: call(4, 2, wide, mask=mask.double()), TypeError, "the mask is a tensor of torch.float64: expected"),
        (lambda: call(4, 2, wide, mask=mask[:, :4]), ValueError, f"has shape (2, 4): expected (2, {4 * n})"),
        (lambda: call(4, 2, wide, mask=none_seen), ValueError, "hides every key of a sequence"),
        (
            lambda: ColumnParallelLinear(4, 4 * n, group=group, gather_output=True, copies=n),
            ValueError,
            f"gather_output=True with copies={n}",
        ),
        (lambda: ColumnParallelLinear(4, 4, group=group, copies=n + 1), ValueError, f"copies={n + 1} on a group of"),
    ]
    problems = []
    with Traffic() as sent:
        for attempt, kind, message in calls:
            try:
                attempt()
            except kind as error:
                problems += [] if message in str(error) else [f"{message!r} is not in {error}"]
                continue
            problems.append(f"not refused: {message}")
    return problems + [f"sent {sent.calls}"] * bool(sent.calls)


def on_ranks() -> Mapping[str, Check]:
    n = dist.get_world_size()
    groups = ProcessGroups([("tp", n)])
    tp, alone = groups.group("tp"), groups.group("pp")
    checks: dict[str, Check] = {"as one process": lambda: all_cases(tp)}
    if n == 2:
        checks["alone, as one process"] = lambda: all_cases(alone)
        checks["traffic alone"] = lambda: traffic(alone)
    checks["low precision"] = lambda: low_precision(tp)
    checks["traffic"] = lambda: traffic(tp)
    checks["initialization"] = lambda: initialization(tp, alone)
    checks["refused"] = lambda: refused(tp)
    return checks


@pytest.mark.parametrize("world", [2, 4])
def test_the_layer_on_ranks(world: int) -> None:
    found = run_world(world, on_ranks)
    wrong = {name: problems[:5] for name, problems in found.items() if problems}
    assert not wrong, wrong
