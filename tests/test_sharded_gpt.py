"""A GPT on ranks: loss and all gradients of one process, and exactly the collectives it needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from sharded_blocks import Block, near, normal, own, plain_layer, plain_norm, raises, whole_shape
from sharded_ranks import Check, Traffic, piece_of, run_world

from sharded.gpt import GPT
from sharded.process_groups import ProcessGroups
from sharded.transformer import finish_gradients

VOCABULARY, LAYERS, POSITIONS, LENGTH, SEQUENCES = 11, 2, 10, 8, 2
CUT = ("embedding.weight", "output.weight")


def cases() -> Iterator[tuple[Block, dict[str, Any]]]:
    """The layer, and what is the model's own."""
    for sp, tied, main_grad in itertools.product((False, True), repeat=3):
        options = {"sequence_parallel": sp, "main_grad": main_grad, "activation": "swiglu", "norm": "rms"}
        model = {"tied": tied, "positions": POSITIONS if tied else None, "divisible_by": 8 if main_grad else 1}
        yield Block(kv_heads=2, options={**options, "rotary": not tied}), model
    options = {"sequence_parallel": True, "recompute": "full", "qk_norm": True}
    yield Block(kv_heads=1, options=options), {"tied": True, "positions": POSITIONS, "divisible_by": 8}


def built(case: Block, model: dict[str, Any], group: dist.ProcessGroup, **more: Any) -> GPT:
    options = {**case.options, "dtype": case.dtype, "kv_heads": case.kv_heads, "group": group, **model, **more}
    return GPT(VOCABULARY, case.hidden, case.heads, case.ffn, LAYERS, **options)


def tokens(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and targets [S, B], some of them ignored."""
    both = (normal(name, 2, LENGTH, SEQUENCES).abs() * 1e6).long() % VOCABULARY
    return both[0], both[1].where(both[1] > 1, -100)


def short(name: str) -> str:
    return "_".join(name.split(".")[-2:])


def piece(case: Block, name: str, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if name in CUT:
        return piece_of(whole, 0, group)
    return own(case, short(name), whole, group) if name.startswith("layers") else whole


def plain_gpt(case: Block, whole: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Logits of the real columns, [S, B, V]."""
    x = whole["embedding.weight"][ids]
    if "positions.weight" in whole:
        x = x + whole["positions.weight"][:LENGTH, None]
    ones = [torch.ones(1, case.heads, 1, 1), torch.ones(1), torch.ones(1)]
    for i in range(LAYERS):
        of_layer = {short(name): p for name, p in whole.items() if name.startswith(f"layers.{i}.")}
        x = plain_layer(case, x, of_layer, ones)
    x = plain_norm(case, x, {short(f"{name}"): p for name, p in whole.items() if name.startswith("norm.")}, "norm")
    return x @ whole.get("output.weight", whole["embedding.weight"])[:VOCABULARY].T


def problems_of(case: Block, model: dict[str, Any], group: dist.ProcessGroup) -> list[str]:
    gpt = built(case, model, group)
    whole = {}
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            shape = tuple(parameter.shape)
            if name in CUT:
                shape = (gpt.embedding.rows, case.hidden)
            elif name.startswith("layers"):
                shape = whole_shape(case, short(name), parameter, group)
            value = normal(name, *shape) * 0.3 + ("norm" in name and "weight" in name)
            whole[name] = value.requires_grad_()
            parameter.copy_(piece(case, name, whole[name], group))
    problems = []
    for m in range(2):
        ids, targets = tokens(f"{dist.get_process_group_ranks(group)} {m}")
        loss = F.cross_entropy(plain_gpt(case, whole, ids).flatten(0, 1), targets.flatten())
        loss.backward()
        found = gpt(ids, targets)
        found.backward()
        problems += near(f"loss {m}", found, loss)
    finish_gradients(gpt)
    for name, parameter in gpt.named_parameters():
        gradient = parameter.main_grad if case.option("main_grad") else parameter.grad
        problems += near(f"{name}.grad", gradient, piece(case, name, whole[name].grad, group))
    return [f"{case}, {model}: {problem}" for problem in problems]


def traffic(group: dist.ProcessGroup) -> list[str]:
    n = group.size()
    whole = LENGTH * SEQUENCES * Block().hidden
    scalars = [("allreduce", LENGTH * SEQUENCES)] * 3
    gather, reduce, back = ("allgather", whole // n), ("reduce", whole), ("backward", 0)
    once = [("allreduce", whole)] * (1 + 2 * LAYERS)
    forward = [reduce, *[gather, reduce] * (2 * LAYERS), gather]
    backward = [reduce, gather, *[gather, reduce, gather] * (2 * LAYERS), gather]
    problems = []
    for sp, expected in ((False, [*once, *scalars, back, *once]), (True, [*forward, *scalars, back, *backward])):
        gpt = built(Block(options={"sequence_parallel": sp}), {"tied": True, "divisible_by": 8}, group)
        ids, targets = tokens("traffic")
        with Traffic() as sent:
            loss = gpt(ids, targets)
            sent.calls.append(back)
            loss.backward()
        problems += [f"{sent.calls}, expected {expected}"] if sent.calls != expected else []
    return problems


def recomputation(group: dist.ProcessGroup) -> list[str]:
    """With dropout, which the embedding has too: bit for bit what is stored."""
    results = []
    for recompute, sp in itertools.product(("none", "selective", "full"), (False, True)):
        options = {"recompute": recompute, "sequence_parallel": sp, "hidden_dropout": 0.1, "attention_dropout": 0.1}
        gpt = built(Block(options=options), {"tied": True, "positions": POSITIONS}, group)
        losses = [gpt(*tokens(f"dropout {m}")) for m in range(2)]
        for loss in losses:
            loss.backward()
        finish_gradients(gpt)
        results.append([*losses, *(parameter.grad for parameter in gpt.parameters())])
    problems = ["dropout is alike in two batches"] * torch.equal(results[0][0], results[0][1])
    for i, result in enumerate(results):
        wrong = [not torch.equal(a, b) for a, b in zip(result, results[i % 2], strict=True)]
        problems += [f"way {i}: {sum(wrong)} tensors differ"] * any(wrong)
    return problems


def initial_values(group: dist.ProcessGroup, alone: dist.ProcessGroup) -> list[str]:
    """The shards joined are one process' parameters; layers and other seeds have numbers of their own."""
    model = {"tied": False, "positions": POSITIONS, "divisible_by": 8}
    one, other, mine = (built(Block(), model, g, seed=s) for g, s in ((alone, 7), (alone, 8), (group, 7)))
    whole = dict(one.named_parameters())
    problems = []
    for name, parameter in mine.named_parameters():
        problems += near(name, parameter, piece(Block(), name, whole[name], group), 0)
    drawn = [p.flatten()[:3].tolist() for m in (one, other) for name, p in m.named_parameters() if "norm" not in name]
    return problems + ["parameters are alike"] * any(drawn.count(numbers) > 1 for numbers in drawn)


def refused(group: dist.ProcessGroup) -> list[str]:
    model = {"tied": True, "positions": POSITIONS}
    gpt = built(Block(options={"sequence_parallel": True}), model, group)
    plain = built(Block(), model, group)
    calls = [
        (lambda: gpt(torch.zeros(4 * group.size() + 1, 1, dtype=torch.int64)), "sequence_parallel needs a length that"),
        (lambda: gpt(torch.zeros(4, dtype=torch.int64)), "expected [positions, sequences]"),
        (lambda: plain(torch.zeros(11, 1, dtype=torch.int64)), "11 positions with positions=10"),
    ]
    with Traffic() as sent:
        problems = [f"not refused: {message}" for call, message in calls if not raises(call, message)]
    return problems + [f"sent {sent.calls}"] * bool(sent.calls)


def on_ranks() -> Mapping[str, Check]:
    groups = ProcessGroups([("tp", dist.get_world_size())])
    tp, alone = groups.group("tp"), groups.group("pp")
    return {
        "as one process": lambda: [problem for case, model in cases() for problem in problems_of(case, model, tp)],
        "traffic": lambda: traffic(tp),
        "recomputation": lambda: recomputation(tp),
        "initial values": lambda: initial_values(tp, alone),
        "refused": lambda: refused(tp),
    }


@pytest.mark.parametrize("world", [2, 4])
def test_a_gpt_on_ranks(world: int) -> None:
    found = run_world(world, on_ranks)
    wrong = {name: problems[:5] for name, problems in found.items() if problems}
    assert not wrong, wrong
