"""Every mutant of mesh, collectives and linear: the right code passes a check that the mutant fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_ranks import Check, Linear, linear_problems, run_world

from sharded import collectives, mutants, wire
from sharded.process_groups import ProcessGroups, set_default

COLUMN, ROW = Linear("column", 4, 6), Linear("row", 4, 6)
GATHER, SKIP, SP = {"gather_output": True}, {"skip_bias_add": True}, {"sequence_parallel": True}
WHOLE, MAIN = {"input_is_parallel": False}, {"main_grad": True}

#: By mutant: the axis where the layer lives, and cases in which it shows.
SHOWS: dict[str, tuple[str, list[Linear]]] = {
    "F03": ("dp", [COLUMN, replace(COLUMN, options=MAIN)]),
    "F04": ("tp", [ROW, replace(ROW, options=SP), replace(ROW, options=MAIN)]),
    "F05": ("tp", [ROW, replace(ROW, options=MAIN)]),
    "F06": ("tp", [replace(COLUMN, transposed=True), replace(COLUMN, transposed=True, dtype=torch.bfloat16)]),
    "F11": (
        "tp",
        [
            replace(COLUMN, options=GATHER),
            replace(COLUMN, options=GATHER, outputs=5),
            replace(COLUMN, options=GATHER, leading=((2, 3),)),
            replace(ROW, options=WHOLE),
        ],
    ),
    "F12": ("tp", [replace(COLUMN, options=GATHER), replace(COLUMN, options={**GATHER, **SKIP})]),
    "F14": ("tp", [COLUMN, replace(COLUMN, options=MAIN), replace(COLUMN, frozen=("weight",))]),
    "F51": ("tp", [ROW, replace(ROW, options=MAIN), replace(ROW, options=WHOLE)]),
}

#: By mutant: cases in which it hides, as a weak test would.
HIDES: dict[str, list[Linear]] = {
    "F03": [replace(COLUMN, frozen=("input",))],
    "F04": [replace(ROW, options={"bias": False}), replace(ROW, options=SKIP)],
    "F05": [replace(ROW, frozen=("bias",)), replace(ROW, options=SKIP)],
    "F06": [COLUMN, replace(COLUMN, transposed=True, leading=((1,),))],
    "F11": [replace(COLUMN, options=GATHER, leading=((1,),)), COLUMN],
    "F12": [COLUMN, replace(COLUMN, options=GATHER, frozen=("input", "weight", "bias"))],
    "F14": [replace(COLUMN, frozen=("input",)), replace(COLUMN, options=SP)],
    "F51": [replace(ROW, frozen=("input", "weight")), replace(ROW, options=SP)],
}


def alike(group: dist.ProcessGroup, init: str) -> list[str]:
    """Whether the shards are one process' tensor (full), or at least not each other's (per_rank)."""
    problems = []
    for kind in ("column", "row"):
        layer = Linear(kind, 8, 8).build(group, init=init)
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, None if layer.weight is None else layer.weight.detach(), group=group)
        if torch.equal(everyone[0], everyone[1]):
            problems.append(f"{kind}: the shards are alike")
    return problems


def with_fault(mutant: str, check: Check) -> Check:
    def faulty() -> list[str]:
        with mutants.applied(mutant):
            return check()

    return faulty


def on_ranks() -> Mapping[str, Check]:
    groups = ProcessGroups([("tp", 2), ("dp", dist.get_world_size() // 2)])
    set_default(groups)
    checks: dict[str, Check] = {}
    for mutant, (axis, shows) in SHOWS.items():
        if groups.group(axis).size() == 1:
            continue  # F03 takes two meshes, or a mesh of two axes
        for sort, cases in (("shows", shows), ("hides", HIDES[mutant])):
            for index, case in enumerate(cases):
                check = lambda case=case, axis=axis: linear_problems(case, groups.group(axis))  # noqa: E731
                checks[f"right {mutant} {sort} {index}"] = check
                checks[f"{mutant} {sort} {index}"] = with_fault(mutant, check)
    for init in ("full", "per_rank"):
        check = lambda init=init: alike(groups.group("tp"), init)  # noqa: E731
        checks[f"right F13 {init}"] = check
        checks[f"F13 shows {init}"] = with_fault("F13", check)
    checks |= {f"again, {name}": check for name, check in checks.items() if name.startswith("right")}
    return checks


@pytest.mark.parametrize("world", [2, 4])
def test_each_mutant_shows_where_it_should(world: int) -> None:
    found = run_world(world, on_ranks)
    for name, problems in found.items():
        if "shows" in name and "right" not in name:
            assert problems, f"{name} is not seen"
        else:
            assert not problems, (name, problems)
    assert len({name.split()[0] for name in found} & set(SHOWS)) == (7 if world == 2 else 8)


def test_the_registry() -> None:
    found = mutants.all_mutants()
    ids = [mutant.id for mutant in found]
    assert ids == sorted(set(ids))
    assert set(ids) >= {"F01", "F03", "F04", "F05", "F06", "F11", "F12", "F13", "F14", "F51"}
    for mutant in found:
        assert mutants.get(mutant.id) == mutant
        assert mutant.thread == "own" or "/" in mutant.thread
        assert "\n" not in mutant.fault
        for target, name, _ in mutant.patches():
            assert name in vars(target), f"{mutant.id} replaces {name}, which {target} does not have"


def test_an_unknown_mutant_is_refused_by_naming_the_known() -> None:
    with pytest.raises(KeyError, match="F99") as error:
        mutants.get("F99")
    assert str(error.value).startswith("there is no mutant 'F99': expected one of F01, ")


def test_a_mutant_is_gone_after_the_block() -> None:
    before = wire.all_reduced, vars(collectives.GatherFromGroup)["backward"]
    with mutants.applied("F06"):
        assert wire.all_reduced is not before[0]

    def failing() -> None:
        with mutants.applied("F12"):
            assert vars(collectives.GatherFromGroup)["backward"] is not before[1]
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        failing()
    assert (wire.all_reduced, vars(collectives.GatherFromGroup)["backward"]) == before


def test_no_mutant_is_imported_unasked() -> None:
    code = (
        "import sys, sharded.linear, sharded.mutants\n"
        "assert not [m for m in sys.modules if m.startswith('sharded.mutants.')]\n"
        "sharded.mutants.apply('F06')\n"
        "import sharded.wire\n"
        "assert 'mutants' in sharded.wire.all_reduced.__module__"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
