"""Reductions from point-to-point sends on real ranks: values of one process, equal bits, and what must be refused."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from sharded_ranks import Check, integers, run_world, same, strided
from torch.distributed import distributed_c10d

from sharded import mutants, point_to_point
from sharded.agreement import ROW, Request
from sharded.all_reduce import all_gather, all_reduce, all_reduce_buckets, reduce_scatter, start_all_reduce
from sharded.cut import piece
from sharded.process_groups import ProcessGroups

ALGORITHMS = ("ring", "halving_doubling", "tree", "parameter_server")
SHAPES = [(), (1,), (0,), (2, 0), (7,), (3, 5), (2, 3, 2)]
Group = dist.ProcessGroup


def parts(group: Group, name: str, *shape: int) -> list[torch.Tensor]:
    """What each rank of the group has."""
    return [integers(f"{name}{rank}", *shape) for rank in dist.get_process_group_ranks(group)]


def one_process(each: list[torch.Tensor], reduction: str) -> torch.Tensor:
    stacked = torch.stack(each)
    return {"sum": stacked.sum(0), "avg": stacked.mean(0), "max": stacked.amax(0), "min": stacked.amin(0)}[reduction]


def spread(x: torch.Tensor) -> torch.Tensor:
    """Not contiguous, if it has two elements or more."""
    if x.dim() > 1:
        return strided(x)
    made = torch.full((2 * x.numel(),), torch.nan, dtype=x.dtype)[::2].view(x.shape)
    return made.copy_(x)


def values(group: Group, algorithm: str, dtype: torch.dtype) -> list[str]:
    """Every reduction, on every shape, contiguous and not, into a new tensor and in place."""
    problems: list[str] = []
    for shape in SHAPES:
        each = parts(group, f"{shape}", *shape)
        for reduction in ("sum", "max", "min", "avg"):
            want = one_process(each, reduction)
            if reduction == "avg" and group.size() & (group.size() - 1):
                continue  # a division that rounds: test_all_reduce.py
            for form in (torch.Tensor.contiguous, spread):
                for in_place in (False, True):
                    x = form(each[group.rank()].to(dtype, copy=True))
                    before = x.clone()
                    label = f"{reduction} of {shape}, in_place={in_place}, {form.__name__}: "
                    found = all_reduce(x, group, reduction=reduction, algorithm=algorithm, in_place=in_place)
                    problems += same(label, found, want)
                    if in_place:
                        problems += [] if found is x else [f"{label}another tensor is returned"]
                    else:
                        problems += same(f"{label}input after", x, before)
                    if found.dtype != dtype:
                        problems.append(f"{label}{found.dtype} comes out")
    return problems


def whole_numbers(group: Group, algorithm: str) -> list[str]:
    each = parts(group, "whole", 5)
    problems = []
    for dtype in (torch.int64, torch.int32, torch.uint8):
        x = each[group.rank()].abs().to(dtype)
        for reduction in ("sum", "max", "min"):
            want = one_process([part.abs() for part in each], reduction)
            problems += same(
                f"{reduction} {dtype}", all_reduce(x, group, reduction=reduction, algorithm=algorithm), want
            )
    return problems


def in_fp32(group: Group, algorithm: str) -> list[str]:
    """256 + 1 is 256 in bf16: ones beside a 256 are seen only where partial sums are kept in fp32. A ring begins the
    first piece on rank 1."""
    n = group.size()
    x = torch.tensor([256.0 if group.rank() == min(1, n - 1) else 1.0]).bfloat16()
    found = all_reduce(x, group, algorithm=algorithm, accumulate_fp32=True)
    want = torch.tensor([256.0 + (n - 1)]).bfloat16()
    problems = same("in fp32", found, want)
    mean = all_reduce(x, group, reduction="avg", algorithm=algorithm, accumulate_fp32=True)
    return problems + same("mean in fp32", mean, torch.tensor([(256.0 + (n - 1)) / n]).bfloat16())


def not_numbers(group: Group, algorithm: str) -> list[str]:
    """A NaN of any rank stays one; an infinity is just that."""
    problems = []
    for where in range(group.size()):
        for reduction in ("sum", "avg", "max", "min"):
            x = torch.ones(3)
            if group.rank() == where:
                x[1], x[2] = torch.nan, torch.inf
            found = all_reduce(x, group, reduction=reduction, algorithm=algorithm)
            last = 1.0 if reduction == "min" and group.size() > 1 else torch.inf
            if not (found[0] in (1.0, group.size()) and found[1].isnan() and found[2] == last):
                problems.append(f"{reduction} with a NaN on {where}: {found.tolist()}")
    return problems


def in_flight(group: Group, algorithm: str) -> list[str]:
    """Several at a time, waited for in another order on every rank; two calls for buckets in between."""
    lengths = [3, 0, 1, 8]
    each = [parts(group, f"bucket {i}", length) for i, length in enumerate(lengths)]
    wants = [one_process(some, "sum") for some in each]
    mine = [some[group.rank()].float() for some in each]
    handles = [start_all_reduce(x, group, algorithm=algorithm, check=i % 2 == 0) for i, x in enumerate(mine)]
    for x in mine:
        x.fill_(torch.nan)  # theirs as soon as start_all_reduce has returned
    order = list(range(len(lengths)))
    order = order[group.rank() % 4 :] + order[: group.rank() % 4]
    found = {i: handles[i].wait() for i in order}
    problems = [problem for i, want in enumerate(wants) for problem in same(f"handle {i}", found[i], want)]
    mine = [some[group.rank()].float() for some in each]
    left = start_all_reduce(mine[0], group, algorithm=algorithm)
    together = all_reduce_buckets(mine, group, algorithm=algorithm)
    problems += [problem for i, want in enumerate(wants) for problem in same(f"bucket {i}", together[i], want)]
    problems += same("begun before", left.wait(), wants[0]) + same("waited for twice", left.wait(), wants[0])
    problems += [] if all_reduce_buckets([], group) == [] else ["no tensor gives some"]
    return problems


def matched_by_order(group: Group, algorithm: str) -> list[str]:
    """The same on a backend that matches messages by their order alone: here one tag is made of all."""
    post = point_to_point.post
    with (
        patch.object(point_to_point, "heeds_tags", lambda group: False),
        patch.object(point_to_point, "post", lambda exchange, group, tag: post(exchange, group, 0)),
    ):
        return in_flight(group, algorithm)


def own_pieces(group: Group) -> list[str]:
    problems = []
    for length in (0, 1, 2, 5, 8):
        each = parts(group, f"piece {length}", length)
        want = one_process(each, "sum")
        offset, due = piece(length, group.size(), group.rank())
        own = want[offset : offset + due]
        x = spread(each[group.rank()].float())
        problems += same(f"reduce_scatter of {length}", reduce_scatter(x, group), own)
        problems += same(f"all_gather of {length}", all_gather(own.float(), group, length), want)
    even = torch.full((2,), float(group.rank()))
    problems += same("even", all_gather(even, group), torch.arange(group.size()).repeat_interleave(2))
    x = parts(group, "matrix", 2, 3)
    offset, due = piece(6, group.size(), group.rank())
    want = one_process(x, "max").flatten()[offset : offset + due]
    return problems + same("of a matrix", reduce_scatter(x[group.rank()].float(), group, reduction="max"), want)


def overwritten(group: Group, algorithm: str) -> list[str]:
    """After the call a rank does what it likes with its input and its result: a rank that comes late is not harmed."""
    problems = []
    for late in range(group.size()):
        x = torch.full((64,), float(group.rank() + 1))
        if group.rank() == late:
            time.sleep(0.05)
        found = all_reduce(x, group, algorithm=algorithm, check=False)
        kept = found.clone()
        x.fill_(torch.nan)
        found.fill_(torch.nan)
        want = torch.full((64,), group.size() * (group.size() + 1) / 2)
        problems += same(f"with rank {late} late", kept, want)
    return problems


def refused(group: Group) -> list[str]:
    """On every rank, with a message that names who differs; the group goes on."""
    ranks = dist.get_process_group_ranks(group)
    odd, last = ranks[-1], group.rank() == group.size() - 1
    three, four, two = torch.ones(3), torch.ones(4), torch.ones(2)
    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "length": (lambda: all_reduce(four if last else three, group), f"rank {odd}: .*sum, ring of 1 tensor: 4"),
        "shape": (lambda: all_reduce(torch.ones(3, 1) if last else three, group), "of other shapes"),
        "dtype": (lambda: all_reduce(three.double() if last else three, group), f"rank {odd}: .* 3 float64"),
        "order": (
            lambda: all_reduce_buckets([two, three] if last else [three, two], group),
            f"rank {odd}: .* of 2 tensors: 2 float32, 3 float32",
        ),
        "number": (
            lambda: all_reduce_buckets([two, three] if last else [two], group),
            f"rank {odd}: .* of 2 tensors",
        ),
        "late tensor": (
            lambda: all_reduce_buckets([two] * 9 + [three if last else two], group),
            "differing in a later tensor",
        ),
        "another reduction": (lambda: all_reduce(two, group, reduction="max" if last else "sum"), f"rank {odd}: .*max"),
        "algorithm": (lambda: all_reduce(two, group, algorithm="tree" if last else "ring"), f"rank {odd}: .*tree"),
        "precision": (lambda: all_reduce(two, group, accumulate_fp32=last), f"rank {odd}: .*in fp32"),
        "unknown here": (
            lambda: all_reduce(two, group, reduction="median" if last else "sum"),
            f"rank {odd} asks for an unknown reduction: expected one of sum, avg, max, min",
        ),
        "unknown everywhere": (lambda: all_reduce(two, group, reduction="median"), "asks for an unknown reduction"),
        "unknown algorithm": (lambda: all_reduce(two, group, algorithm="star"), "asks for an unknown algorithm"),
        "mean": (lambda: all_reduce(two.long(), group, reduction="avg"), "not floating-point"),
        "bool": (lambda: all_reduce(two.bool(), group), "another dtype than can be reduced"),
        "sparse": (lambda: all_reduce(two.to_sparse(), group), "not a dense tensor"),
        "piece": (lambda: all_gather(torch.ones(3 if last else 1), group, group.size()), f"rank {odd} has a piece"),
        "scattered": (lambda: reduce_scatter(four if last else three, group), f"rank {odd}: reduce_scatter, "),
        "handle": (lambda: start_all_reduce(four if last else three, group).wait(), f"rank {odd}: "),
        "unchecked": (lambda: all_reduce(two, group, reduction="median", check=False), "asks for an unknown reduction"),
    }  # fmt: skip
    problems = []
    for name, (call, says) in calls.items():
        if group.size() == 1 and last and says.startswith("rank"):
            says = "asks for|not|has a piece|"
        try:
            call()
        except ValueError as error:
            if re.search(says, str(error)) is None:
                problems.append(f"{name}: {error}")
        else:
            if group.size() > 1 or name in ("unknown everywhere", "unknown algorithm", "mean", "bool", "sparse"):
                problems.append(f"{name} is accepted")
        problems += same(f"after {name}", all_reduce(two, group), two * group.size())
    if group.size() > 1:
        begun, right = start_all_reduce(four if last else three, group), start_all_reduce(two, group)
        if last:  # the others end with the refusal, and leave it not alone
            problems += same("behind one that is refused", right.wait(), two * group.size())
        with pytest.raises(ValueError, match="do not ask for the same"):
            begun.wait()
    return problems


def outside() -> list[str]:
    """A group that this rank is not in is refused here; its ranks go on."""
    group: Any = dist.new_group([0])
    x = torch.ones(2)
    if dist.get_rank() == 0:
        return same("alone", all_reduce(x, group), x)
    for call in (lambda: all_reduce(x, group), lambda: all_gather(x, group), lambda: all_reduce_buckets([x], group)):
        try:
            call()
        except ValueError as error:
            if "this rank is not in the group" not in str(error):
                return [str(error)]
        else:
            return ["accepted"]
    return []


def in_another_world() -> list[str]:
    """Names of groups are used again there, by other ranks: a group that began nothing begins as on every rank."""
    rank, n, store = dist.get_rank(), dist.get_world_size(), distributed_c10d._get_default_store()
    for half in ([0], list(range(1, n))):
        group = dist.new_group(half)
        if rank in half:
            all_reduce(torch.ones(2), group, check=False)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=n)
    everyone = dist.new_group(list(range(n)))
    return same("again", all_reduce(torch.ones(2), everyone, check=False), torch.full((2,), float(n)))


def on_ranks() -> Mapping[str, Check]:
    n = dist.get_world_size()
    groups = ProcessGroups([("tp", 2), ("dp", n // 2)]) if n % 2 == 0 else ProcessGroups([("tp", n)])
    everyone = groups.group("tp", "dp")
    checks: dict[str, Check] = {}
    for name in ("tp", "dp", "world"):
        group = everyone if name == "world" else groups.group(name)
        for algorithm in ALGORITHMS:
            dtype = {"tp": torch.float32, "dp": torch.float64, "world": torch.bfloat16}[name]
            checks[f"values {name} {algorithm}"] = lambda g=group, a=algorithm, d=dtype: values(g, a, d)
            for check in (whole_numbers, in_fp32, not_numbers, in_flight, overwritten):
                checks[f"{check.__name__} {name} {algorithm}"] = lambda c=check, g=group, a=algorithm: c(g, a)
            checks[f"in order {name} {algorithm}"] = lambda g=group, a=algorithm: matched_by_order(g, a)
        checks[f"pieces {name}"] = lambda g=group: own_pieces(g)
        checks[f"refused {name}"] = lambda g=group: refused(g)
    checks["outside"] = outside
    checks["close"] = lambda: groups.close() or []
    checks["again"] = in_another_world
    return checks


@pytest.mark.parametrize("world", [2, 3, 4])
def test_reductions_on_ranks(world: int) -> None:
    found = run_world(world, on_ranks)
    assert not any(found.values()), {name: problems for name, problems in found.items() if problems}


def with_faults() -> Mapping[str, Check]:
    groups = ProcessGroups([("tp", dist.get_world_size())])
    group = groups.group("tp")

    def flat() -> list[str]:
        each = parts(group, "flat", 5)
        return same("flat", all_reduce(each[group.rank()].float(), group), one_process(each, "sum"))

    def in_place() -> list[str]:
        each = parts(group, "in place", 5)
        x = spread(each[group.rank()].float())
        all_reduce(x, group, in_place=True)
        return same("in place", x, one_process(each, "sum"))

    def mean() -> list[str]:
        each = parts(group, "mean", 4)
        found = all_reduce(each[group.rank()].float(), group, reduction="avg", algorithm="tree")
        return same("mean", found, one_process(each, "avg"))

    shows = {
        "F52": flat,
        "F06b": in_place,
        "F44b": lambda: in_fp32(group, "ring"),
        "F49b": lambda: overwritten(group, "ring"),
        "F52b": mean,
    }
    checks: dict[str, Check] = {}
    for mutant, check in shows.items():
        checks[f"right {mutant}"] = check

        def faulty(mutant: str = mutant, check: Check = check) -> list[str]:
            with mutants.applied(mutant):
                found = check()
            everyone: list[Any] = [None] * group.size()
            dist.all_gather_object(everyone, found, group=group)
            return [problem for some in everyone for problem in some]

        checks[f"faulty {mutant}"] = faulty
    return checks


def test_each_mutant_shows_where_the_right_code_does_not() -> None:
    found = run_world(4, with_faults)
    for name, problems in found.items():
        assert bool(problems) == name.startswith("faulty"), (name, problems)
    assert len(found) == 10


def test_a_row_says_all_that_a_request_asks_for() -> None:
    plain = Request("all_reduce", "ring", "sum", False, ((3,), (2, 2)), (torch.float32, torch.float32))
    row = plain.row()
    assert len(row) == ROW
    assert row == plain.row()
    assert all(-(2**63) <= number < 2**63 for number in row)
    others = [
        replace(plain, operation="reduce_scatter"),
        replace(plain, algorithm="tree"),
        replace(plain, reduction="max"),
        replace(plain, fp32=True),
        replace(plain, shapes=((3,), (4,))),
        replace(plain, shapes=((2, 2), (3,))),
        replace(plain, dtypes=(torch.float32, torch.float64)),
        replace(plain, shapes=((3,),), dtypes=(torch.float32,)),
    ]
    rows = {tuple(one.row()) for one in (plain, *others)}
    assert len(rows) == 1 + len(others)
    assert plain.problem() == 0
