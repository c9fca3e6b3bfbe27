"""Every mutant of embedding and cross entropy: the right code passes a check that the mutant fails."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import test_sharded_cross_entropy
import test_sharded_embedding
import torch
import torch.distributed as dist
from sharded_ranks import Check, run_world
from test_sharded_cross_entropy import Loss
from test_sharded_embedding import Table

from sharded import mutants
from sharded.process_groups import ProcessGroups

SMOOTH, MEAN = {"label_smoothing": 0.3}, {"reduction": "mean"}
PADDED = {"padding_idx": 1}
#: So many that every row is looked up.
MANY = ((20, 3),)

#: By mutant: cases in which it shows, and cases in which it hides, as a weak test would have them.
SHOWS: Mapping[str, list[Loss | Table]] = {
    "F15": [Loss(options=SMOOTH), Loss(options={**SMOOTH, "smoothing": "megatron"}), Loss(padding=3, options=SMOOTH)],
    "F16": [Loss(options=SMOOTH), Loss(options={**SMOOTH, "smoothing": "megatron"}), Loss(padding=3, options=SMOOTH)],
    "F17": [Loss(), Loss(padding=2), Loss(options=MEAN)],
    "F18": [Loss(), Loss(dtype=torch.float32)],
    "F20": [Loss(ignored=(0, 3), options=MEAN), Loss(ignored=tuple(range(12)), options=MEAN)],
    "F21": [Loss(), Loss(scale=1000.0)],
    "F22": [Loss(), Loss(options=SMOOTH)],
    "F19": [Table(leading=MANY, options=PADDED), Table(leading=MANY, options={**PADDED, "main_grad": True})],
    "F23": [Table(11), Table(11, options={"sequence_parallel": True})],
}
HIDES: Mapping[str, list[Loss | Table]] = {
    "F15": [Loss(), Loss(padding=3)],
    "F16": [Loss(), Loss(options=MEAN)],
    "F17": [],
    "F18": [Loss(dtype=torch.bfloat16), Loss(dtype=torch.float16)],
    "F20": [Loss(options=MEAN), Loss(ignored=(0, 3)), Loss(ignored=(0, 3), options={"reduction": "sum"})],
    "F21": [Loss(scale=0.0)],
    "F22": [],
    "F19": [Table(leading=MANY), Table(leading=((1,),), options=PADDED)],
    "F23": [Table(), Table(11, options={"divisible_by": 4})],
}


def problems_of(case: Loss | Table, group: dist.ProcessGroup) -> list[str]:
    if isinstance(case, Loss):
        return test_sharded_cross_entropy.problems_of(case, group)
    return test_sharded_embedding.problems_of(case, group)


def with_fault(mutant: str, check: Check) -> Check:
    def faulty() -> list[str]:
        with mutants.applied(mutant):
            return check()

    return faulty


def on_ranks() -> Mapping[str, Check]:
    groups = ProcessGroups([("tp", dist.get_world_size())])
    checks: dict[str, Check] = {}
    for mutant, shows in SHOWS.items():
        for sort, cases, axis in (("shows", shows, "tp"), ("hides", HIDES[mutant], "tp"), ("alone", shows, "pp")):
            if sort == "alone" and mutant in ("F18", "F20"):
                continue  # which show on one rank too
            for index, case in enumerate(cases):
                check = lambda case=case, axis=axis: problems_of(case, groups.group(axis))  # noqa: E731
                checks[f"right {mutant} {sort} {index}"] = check
                checks[f"{mutant} {sort} {index}"] = with_fault(mutant, check)
    return checks


@pytest.mark.parametrize("world", [2, 4])
def test_each_mutant_shows_where_it_should(world: int) -> None:
    found = run_world(world, on_ranks)
    for name, problems in found.items():
        if "shows" in name and "right" not in name:
            assert problems, f"{name} is not seen"
        else:
            assert not problems, (name, problems[:3])
    assert {name.split()[0] for name in found} - {"right"} == set(SHOWS)


def test_every_mutant_of_the_two_subjects_is_here() -> None:
    known = {one.id for one in mutants.all_mutants() if one.subject in ("embedding", "cross_entropy")}
    assert known == set(SHOWS) == set(HIDES)
