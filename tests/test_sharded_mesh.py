"""Mesh arithmetic, and the process groups of a mesh on ranks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_ranks import Check, closing, run_world

from sharded import mesh, mutants
from sharded.mesh import AXIS_NAMES
from sharded.process_groups import COMBINED_AXES, ProcessGroups, default_group, families, groups_to_create, set_default

MESHES = [
    [],
    [("tp", 2)],
    [("tp", 2), ("dp", 3)],
    [("dp", 3), ("tp", 2)],
    [("pp", 3), ("tp", 2), ("dp", 2)],
    [("tp", 2), ("cp", 3), ("ep", 1), ("dp", 2), ("pp", 2)],
    [("ep", 2), ("pp", 1), ("cp", 2), ("tp", 1), ("dp", 3)],
]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_groups_partition_the_world_along_their_axes(axes: list[tuple[str, int]]) -> None:
    world = math.prod(size for _, size in axes)
    at = [mesh.coordinates(axes, rank) for rank in range(world)]
    for names in [*((name,) for name in AXIS_NAMES), *COMBINED_AXES]:
        groups = mesh.group_ranks(axes, names).tolist()
        # Written out: ranks that agree on every other axis.
        by_rest: dict[tuple[int, ...], list[int]] = {}
        for rank in range(world):
            by_rest.setdefault(tuple(at[rank][a] for a in AXIS_NAMES if a not in names), []).append(rank)
        assert groups == sorted(by_rest.values()), names


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_rank_at_is_the_inverse_of_coordinates(axes: list[tuple[str, int]]) -> None:
    ranks = range(mesh.world_size(axes))
    assert [mesh.rank_at(axes, mesh.coordinates(axes, rank)) for rank in ranks] == list(ranks)
    assert len({tuple(mesh.coordinates(axes, rank).values()) for rank in ranks}) == len(ranks)


def test_first_axis_varies_fastest() -> None:
    axes = [("dp", 2), ("tp", 3)]
    assert mesh.group_ranks(axes, "dp").tolist() == [[0, 1], [2, 3], [4, 5]]
    assert mesh.group_ranks(axes, "tp").tolist() == [[0, 2, 4], [1, 3, 5]]
    assert mesh.coordinates(axes, 3) == {"tp": 1, "cp": 0, "ep": 0, "dp": 1, "pp": 0}


def test_embedding_groups_are_first_and_last_stage() -> None:
    axes = [("tp", 2), ("pp", 3)]
    assert mesh.embedding_ranks(axes).tolist() == [[0, 4], [1, 5]]
    assert mesh.position_embedding_ranks(axes).tolist() == [[0], [1]]
    assert mesh.embedding_ranks([("tp", 2), ("pp", 1)]).tolist() == [[0], [1]]
    assert mesh.optimizer_state_ranks([("tp", 2), ("cp", 2), ("dp", 2)]).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_stages() -> None:
    axes = [("tp", 2), ("pp", 3)]
    assert mesh.stage_neighbours(axes, 1) == (1, 5, 5, 3)
    assert mesh.stage_neighbours(axes, 3) == (1, 5, 1, 5)
    assert mesh.stage_neighbours(axes, 5) == (1, 5, 3, 1)
    assert [[mesh.chunk_index(axes, stage, v) for v in (0, 1)] for stage in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [mesh.stage_of_chunk(axes, chunk) for chunk in range(5)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]


def test_a_million_ranks_are_quick() -> None:
    axes = [("tp", 8), ("cp", 5), ("ep", 5), ("dp", 500), ("pp", 10)]
    start = time.perf_counter()
    for names in [*((name,) for name in AXIS_NAMES), *COMBINED_AXES]:
        assert mesh.group_ranks(axes, names).numel() == 10**6
    assert time.perf_counter() - start < 5  # measured: 0.5 s; a loop over ranks would take minutes


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ([("xp", 2)], "unknown mesh axis 'xp': expected one of tp"),
        ([("tp", 2), ("tp", 1)], "'tp' is given twice"),
        ([("tp", 0)], "size 0: expected an int of at least 1"),
        ([("tp", 2.0)], "size 2.0: expected an int"),
        ([("tp", True)], "size True: expected an int"),
        ([("tp", 3)], "multiply to 3: expected 4"),
    ],
)
def test_an_invalid_mesh_is_refused(axes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh.validate(axes, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mesh.coordinates([("tp", 2)], 2), "rank 2 is outside .* expected 0 to 1"),
        (lambda: mesh.rank_at([("tp", 2)], {"tp": 2}), "coordinate tp=2 is outside"),
        (lambda: mesh.rank_at([("tp", 2)], {"dp": 1}), "coordinate dp=1 is outside"),
        (lambda: mesh.group_ranks([("tp", 2)], "xp"), "unknown mesh axis 'xp'"),
        (lambda: mesh.chunk_index([("pp", 2)], 2, 0), "expected a stage of 0 to 1"),
        (lambda: mesh.stage_of_chunk([("pp", 2)], -1), "no model chunk -1"),
        (lambda: default_group(), "no default mesh"),
    ],
)
def test_arguments_outside_the_mesh_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# On ranks.


def names_that_differ(groups: ProcessGroups) -> list[str]:
    """Groups that other ranks know by another name, or another group of that name. Sends on the default group only."""
    mine = {
        family: (group.group_name, dist.get_process_group_ranks(group))
        for family in families()
        if (group := groups._mine.get(frozenset(family))) is not None
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    members_of: dict[str, list[int]] = {}
    problems = []
    for family, rank in itertools.product(families(), range(len(everyone))):
        name, ranks = everyone[rank].get(family, (None, []))
        if name is None:
            continue
        if members_of.setdefault(name, ranks) != ranks:
            problems.append(f"{name} is {members_of[name]} and {ranks}")
        problems += [f"{ranks} has two names" for r in ranks if everyone[r][family][0] != name]
    return problems


def group_problems(axes: list[tuple[str, int]]) -> list[str]:
    """What an all-gather and a sum of rank numbers show to be wrong in any group."""
    problems, rank = [], dist.get_rank()
    with closing(ProcessGroups(axes)) as groups:
        problems += names_that_differ(groups)
        for family in families():
            expected = next((ranks for ranks in groups_to_create(axes, family) if rank in ranks), None)
            group = groups._mine.get(frozenset(family))
            if group is None or expected is None:
                problems += [f"{family}: {group} for {expected}"] if group is not expected else []
                continue
            gathered = [torch.zeros(1, dtype=torch.int64) for _ in expected]
            dist.all_gather(gathered, torch.tensor([rank]), group=group)
            if torch.cat(gathered).tolist() != expected or group.rank() != expected.index(rank):
                problems.append(f"{family} gathers {gathered}, expected {expected}")
        if any(groups.group("pp", "tp") is not groups.group(*names) for names in [("tp", "pp")]):
            problems.append("the order of combined axes matters")
    return problems


def sums_along_dp() -> list[str]:
    with closing(ProcessGroups([("tp", 2), ("dp", 2)])) as groups:
        total = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(total, group=groups.group("dp"))
    expected = 4 if dist.get_rank() % 2 == 0 else 6
    return [] if total.item() == expected else [f"sum {total.item()}, expected {expected}"]


def invalid_mesh() -> list[str]:
    """Refused on every rank, with no group made."""
    before = dist.distributed_c10d._world.group_count
    for axes in ([("tp", 3)], [("xp", 4)], []):
        try:
            ProcessGroups(axes)
        except ValueError:
            continue
        return [f"{axes} is not refused"]
    return [] if dist.distributed_c10d._world.group_count == before else ["groups were made"]


def lifetime() -> list[str]:
    """Two meshes at a time, the default one, and nothing left after close."""
    before, problems = len(dist.distributed_c10d._world.pg_map), []
    n = dist.get_world_size()
    one, other = ProcessGroups([("tp", n)]), ProcessGroups([("dp", n)])
    set_default(one)
    if default_group() is not one.group("tp") or default_group("dp") is not one.group("dp"):
        problems.append("the default group is not the default mesh's")
    other.close()
    total = torch.ones(1)
    dist.all_reduce(total, group=default_group())
    problems += [] if total.item() == n else ["a mesh does not survive the closing of another"]
    one.close()
    one.close()
    for call in (default_group, lambda: one.group("tp")):
        try:
            call()
        except ValueError:
            continue
        problems.append("a closed mesh gives groups")
    left = len(dist.distributed_c10d._world.pg_map) - before
    return problems + ([f"{left} groups are left"] if left else [])


def waits_for_the_slowest() -> list[str]:
    """No rank goes on, to close the mesh for example, while another one is still connecting to its groups."""
    new_group, ended = dist.new_group, []

    def slow(ranks: list[int]) -> Any:
        group = new_group(ranks)
        if dist.get_rank() == 1:
            time.sleep(0.1)
        ended.append(time.monotonic())
        return group

    dist.new_group = slow
    try:
        groups = ProcessGroups([("tp", dist.get_world_size())])
    finally:
        dist.new_group = new_group
    # One clock for all processes of a machine.
    went_on, last = torch.tensor(time.monotonic(), dtype=torch.float64), torch.tensor(ended[-1], dtype=torch.float64)
    dist.all_reduce(last, op=dist.ReduceOp.MAX)
    groups.close()
    return [] if went_on >= last else [f"went on {last - went_on:.3f} s before the last rank had its groups"]


def with_fault(check: Check) -> Check:
    def faulty() -> list[str]:
        with mutants.applied("F01"):
            return check()

    return faulty


def names(axes: list[tuple[str, int]]) -> list[str]:
    with closing(ProcessGroups(axes)) as groups:
        return names_that_differ(groups)


def on_two_ranks() -> Mapping[str, Check]:
    return {
        "groups tp": lambda: group_problems([("tp", 2)]),
        "groups pp": lambda: group_problems([("pp", 2), ("dp", 1)]),
        "lifetime": lifetime,
        "waits for the slowest": waits_for_the_slowest,
        "F01 in a world of two": with_fault(lambda: names([("tp", 2)])),
        "groups after F01": lambda: group_problems([("tp", 2)]),
    }


def on_four_ranks() -> Mapping[str, Check]:
    found: dict[str, Check] = {
        f"groups {axes}": (lambda axes=axes: group_problems(axes))
        for axes in (
            [("tp", 2), ("dp", 2)],
            [("dp", 2), ("tp", 2)],
            [("tp", 4)],
            [("pp", 4)],
            [("cp", 2), ("pp", 2)],
            [("ep", 1), ("tp", 2), ("pp", 2)],
        )
    }
    return found | {
        "invalid mesh": invalid_mesh,
        "lifetime": lifetime,
        "sums along dp": sums_along_dp,
        "F01 in the sums": with_fault(sums_along_dp),
        "F01 in the names": with_fault(lambda: names([("tp", 2), ("dp", 2)])),
        "F01 in another order": with_fault(lambda: names([("dp", 2), ("tp", 2)])),
        "F01 with one axis": with_fault(lambda: names([("dp", 4)])),
        "F01 with stages": with_fault(lambda: names([("pp", 4)])),
    }


@pytest.mark.parametrize(("world", "checks"), [(2, on_two_ranks), (4, on_four_ranks)])
def test_groups_on_ranks(world: int, checks: Any) -> None:
    found = run_world(world, checks)
    right = {name: problems for name, problems in found.items() if not name.startswith("F01")}
    assert not any(right.values()), right
    assert all(problems for name, problems in found.items() if name.startswith("F01")), found
    if world == 4:  # the thread's numbers
        assert sorted(found["F01 in the sums"]) == [
            f"rank {r}: sum 5, expected {4 if r % 2 == 0 else 6}" for r in range(4)
        ]
