"""Every mutant of the transformer layer: the right code passes a check that the mutant fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from sharded_blocks import Block, block_problems, mask_problems
from sharded_ranks import Check, run_world
from test_sharded_mutants import with_fault

from sharded import mutants
from sharded.process_groups import ProcessGroups

PLAIN, SHARED = Block(), Block(kv_heads=1)
DROPS = {"attention_dropout": 0.5, "hidden_dropout": 0.1}
SP, MAIN, HEADS, RMS = {"sequence_parallel": True}, {"main_grad": True}, {"qk_norm": True}, {"norm": "rms"}

#: By mutant: cases in which it shows, and cases in which it hides, as a weak test would.
SHOWS: dict[str, list[Block]] = {
    "F07": [replace(PLAIN, options=SP), replace(PLAIN, options={**SP, **RMS, **MAIN})],
    "F08": [replace(PLAIN, options=SP), replace(PLAIN, options={**SP, **RMS, **MAIN})],
    "F09": [replace(PLAIN, options=HEADS), replace(SHARED, options={**HEADS, **RMS, **MAIN})],
    "F10": [SHARED, replace(SHARED, options=SP), replace(SHARED, options=MAIN)],
    "F48": [
        replace(PLAIN, options={"attention_dropout": 0.5, "recompute": "selective"}),
        replace(PLAIN, options={**DROPS, "recompute": "full"}),
    ],
}
HIDES: dict[str, list[Block]] = {
    "F07": [PLAIN, replace(SHARED, options=HEADS)],
    "F08": [PLAIN, replace(SHARED, options=HEADS)],
    "F09": [PLAIN, replace(PLAIN, options={**HEADS, **SP})],
    "F10": [PLAIN, replace(PLAIN, options={**SP, **HEADS})],
    "F48": [replace(PLAIN, options=DROPS), replace(PLAIN, options={"recompute": "full"})],
}


def what_is_wrong(mutant: str, group: dist.ProcessGroup) -> list[str]:
    """The names of the tensors that the mutant gets wrong, in the first case that shows it."""
    with mutants.applied(mutant):
        problems = block_problems(SHOWS[mutant][0], group)
    expected = {
        "F07": {"norm1_weight.grad", "norm1_bias.grad", "norm2_weight.grad", "norm2_bias.grad"},
        "F08": {"norm1_weight.grad", "norm1_bias.grad", "norm2_weight.grad", "norm2_bias.grad"},
        "F09": {"q_norm_weight.grad", "k_norm_weight.grad"},
        "F10": {"input gradient 0", "input gradient 1", "norm1_weight.grad", "norm1_bias.grad"},
        # All that lies before attention's dropout; a key's bias has no gradient.
        "F48": {f"{what} {m}" for what in ("dropout", "input gradient") for m in (0, 1)}
        | {
            f"{name}.grad"
            for name in ("norm1_weight", "norm1_bias", "q_weight", "q_bias", "k_weight", "v_weight", "v_bias")
        },
    }[mutant]
    found = {problem.partition(" is ")[0] for problem in problems}
    return [] if found == expected else [f"wrong are {sorted(found)}"]


def masks(attention: float, hidden: float, sequence_parallel: bool, group: dist.ProcessGroup) -> list[str]:
    options = {"attention_dropout": attention, "hidden_dropout": hidden, "sequence_parallel": sequence_parallel}
    torch.manual_seed(1)  # the same on all ranks, as a trainer leaves it
    return mask_problems(Block(options=options), group)


def on_ranks() -> Mapping[str, Check]:
    group = ProcessGroups([("tp", dist.get_world_size())]).group("tp")
    checks: dict[str, Check] = {}
    for mutant, shows in SHOWS.items():
        for sort, cases in (("shows", shows), ("hides", HIDES[mutant])):
            for index, case in enumerate(cases):
                check = lambda case=case: block_problems(case, group)  # noqa: E731
                checks[f"right {mutant} {sort} {index}"] = check
                checks[f"{mutant} {sort} {index}"] = with_fault(mutant, check)
        checks[f"{mutant} in the right tensors"] = lambda mutant=mutant: what_is_wrong(mutant, group)
    for sort, drops in (
        ("shows", [(0.5, 0.0, False), (0.1, 0.1, False), (0.0, 0.5, True)]),
        ("hides", [(0.0, 0.0, False), (0.0, 0.5, False)]),
    ):
        for index, drop in enumerate(drops):
            check = lambda drop=drop: masks(*drop, group)  # noqa: E731
            checks[f"right F47 {sort} {index}"] = check
            checks[f"F47 {sort} {index}"] = with_fault("F47", check)
    return checks


@pytest.mark.parametrize("world", [2, 4])
def test_each_mutant_shows_where_it_should(world: int) -> None:
    found = run_world(world, on_ranks)
    for name, problems in found.items():
        if "shows" in name and "right" not in name:
            assert problems, f"{name} is not seen"
        else:
            assert not problems, (name, problems)


def test_the_registry_has_them() -> None:
    of_the_layer = {mutant.id for mutant in mutants.all_mutants() if mutant.subject == "transformer"}
    assert of_the_layer == {*SHOWS, "F47"}
