"""The transformer layer on ranks: outputs and all gradients of one process, and exactly the collectives it needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch.distributed as dist
from sharded_blocks import Block, block_problems
from sharded_ranks import Check, run_world

from sharded.process_groups import ProcessGroups


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
    for recompute, sp in itertools.product(("selective", "full"), (False, True)):
        options = {"recompute": recompute, "sequence_parallel": sp, "activation": "swiglu", "main_grad": sp}
        yield replace(base, kv_heads=2, mask="padding", options=options)
        yield replace(base, kv_heads=2, frozen_input=True, options=options)
    yield replace(base, hidden=24, heads=8, kv_heads=4, ffn=8, options={"rotary": False, "qk_norm": True})


def all_cases(group: dist.ProcessGroup) -> list[str]:
    return [f"{case}: {problem}" for case in cases() for problem in block_problems(case, group)]


def on_ranks() -> Mapping[str, Check]:
    n = dist.get_world_size()
    groups = ProcessGroups([("tp", n)])
    tp, alone = groups.group("tp"), groups.group("pp")
    checks: dict[str, Check] = {"as one process": lambda: all_cases(tp)}
    if n == 2:
        checks["alone, as one process"] = lambda: all_cases(alone)
    return checks


@pytest.mark.parametrize("world", [2, 4])
def test_the_layer_on_ranks(world: int) -> None:
    found = run_world(world, on_ranks)
    wrong = {name: problems[:5] for name, problems in found.items() if problems}
    assert not wrong, wrong
