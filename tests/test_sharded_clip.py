"""Clipping on eight ranks (tp 2, pp 2, dp 2) with every kind of parameter, beside its mutants; and bad input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_ranks import Check, run_world

from sharded import clip, mutants
from sharded.clip import Held, NonFiniteNorm, clip_gradients
from sharded.process_groups import ProcessGroups

#: name: elements, whether they are cut over tp and dp, and the stages that hold them, the one that counts first.
MODEL: dict[str, tuple[list[float], bool, bool, tuple[int, ...]]] = {
    "embedding": ([1, -2, 3, -4], True, False, (0, 1)),
    "norm": ([5, 6], False, False, (0,)),
    "weight": ([-7, 8, 1, 2], True, True, (1,)),
    "bias": ([3], False, True, (1,)),  # the second dp rank has nothing of it
}
WHOLE = torch.tensor([x for values, *_ in MODEL.values() for x in values], dtype=torch.float64)
NORMS = {1.0: 42.0, 2.0: math.sqrt(218), math.inf: 8.0, 3.0: float((WHOLE.abs() ** 3).sum() ** (1 / 3))}


def piece(values: torch.Tensor, cut: bool, group: dist.ProcessGroup) -> torch.Tensor:
    return values.tensor_split(2)[group.rank()] if cut else values


def build(groups: ProcessGroups, dtype: torch.dtype, times: float, bad: tuple[int, float] | None = None) -> dict[str, Held]:  # fmt: skip  # noqa: E501
    """This rank's parameters. bad: a rank and what its first gradient is to hold."""
    tp, pp, dp = (groups.group(axis) for axis in ("tp", "pp", "dp"))
    held: dict[str, Held] = {}
    for name, (elements, split, sharded, stages) in MODEL.items():
        if pp.rank() not in stages:
            continue
        own = piece(piece(torch.tensor(elements, dtype=torch.float64), split, tp), sharded, dp)
        parameter = torch.nn.Parameter(torch.zeros(own.shape, dtype=dtype))
        parameter.grad = (own * times).to(dtype)
        if bad is not None and bad[0] == dist.get_rank() and name == ("embedding", "weight")[pp.rank()]:
            parameter.grad[0] = bad[1]
        alike = {"tp": tp} if not split else {}
        alike |= {"dp": dp} if not sharded else {}
        held[name] = Held(parameter, alike, copy=pp.rank() != stages[0])
    held["frozen"] = Held(torch.nn.Parameter(torch.zeros(2, dtype=dtype)), {"tp": tp, "dp": dp})
    return held


def on_ranks() -> Mapping[str, Check]:
    groups = ProcessGroups([("tp", 2), ("pp", 2), ("dp", 2)], combined=())
    along = {axis: groups.group(axis) for axis in ("tp", "pp", "dp")}

    def right(p: float, limit: float, dtype: torch.dtype = torch.float32, times: float = 1.0, scale: float = 1.0) -> list[str]:  # fmt: skip  # noqa: E501
        held = build(groups, dtype, times * scale)
        found = clip_gradients(list(held.values()), limit, norm_type=p, groups=along, loss_scale=scale)
        want = NORMS[p] * times
        problems = [] if math.isclose(found.norm, want, rel_tol=1e-12) else [f"norm {found.norm}, expected {want}"]
        everyone: list[Any] = [None] * 8
        dist.all_gather_object(everyone, found)
        problems += [] if len(set(everyone)) == 1 else [f"ranks differ: {everyone}"]
        unclipped, by = build(groups, dtype, times), min(1.0, limit / want)
        for name, one in held.items():
            before, after = unclipped[name].parameter.grad, one.parameter.grad
            if before is not None and not torch.allclose(
                after.double(), before.double() * by, rtol=4 * torch.finfo(dtype).eps, atol=0
            ):  # type: ignore[union-attr]
                problems.append(f"{name} is {after}, expected {before} times {by}")
        return problems

    def nonfinite(p: float, value: float, rank: int, policy: str) -> list[str]:
        held = build(groups, torch.float32, 1.0, (rank, value))
        before = {name: None if h.parameter.grad is None else h.parameter.grad.clone() for name, h in held.items()}
        try:
            found = clip_gradients(list(held.values()), 1.0, norm_type=p, groups=along, policy=policy)
        except NonFiniteNorm:
            return [] if policy == "raise" else ["raised"]
        if policy == "raise":
            return ["did not raise"]
        kept = all(b is None or torch.equal(b.nan_to_num(), held[n].parameter.grad.nan_to_num()) for n, b in before.items())  # type: ignore[union-attr]  # fmt: skip  # noqa: E501
        if policy == "skip" and not (found.skipped and kept):
            return [f"skip: {found}, gradients kept: {kept}"]
        return [] if not math.isfinite(found.norm) else [f"norm {found.norm}"]

    low, huge = torch.float16, 2.0**100
    checks: dict[str, Check] = {}
    for p in NORMS:
        checks[f"norm {p}"] = lambda p=p: right(p, NORMS[p] / 2) + right(p, NORMS[p]) + right(p, 2 * NORMS[p])
    checks["fp16 of 300 and more"] = lambda: right(2.0, 100.0, low, 256.0)
    checks["huge"] = lambda: right(2.0, 1.0, torch.float32, huge)
    checks["tiny"] = lambda: right(2.0, 1.0, torch.float32, 1 / huge)
    checks["loss scale"] = lambda: right(2.0, 1.0, scale=8.0) + right(math.inf, 20.0, scale=8.0)
    for p in NORMS:
        for value in (math.inf, math.nan):
            checks[f"{value} {p}"] = lambda p=p, value=value: [
                one for rank in (0, 3) for policy in clip.POLICIES for one in nonfinite(p, value, rank, policy)
            ]
    shows: dict[str, Check] = {
        "F31": lambda: right(2.0, 20.0, scale=8.0), "F31b": lambda: right(2.0, 1.0, scale=8.0),
        **dict.fromkeys(("F32", "F33", "F34", "F34b", "F37", "F37b", "F38", "F38b"), checks["norm 2.0"]),
        "F35": checks["norm inf"], "F35b": checks["norm inf"], "F35c": lambda: nonfinite(math.inf, math.nan, 0, "skip"),
        "F36": checks["fp16 of 300 and more"], "F36b": checks["huge"],
    }  # fmt: skip
    return checks | {name: with_fault(name, check) for name, check in shows.items()}


def with_fault(mutant: str, check: Check) -> Check:
    def faulty() -> list[str]:
        with mutants.applied(mutant):
            return check()

    return faulty


def test_norms_on_eight_ranks_and_each_mutant() -> None:
    found = run_world(8, on_ranks)
    for name, problems in found.items():
        assert bool(problems) == name.startswith("F"), (name, problems)
    assert len(found) == 16 + 15


def test_one_process_without_groups_or_gradients() -> None:
    assert clip_gradients([], 1.0).norm == 0.0
    assert clip_gradients([], 1.0, norm_type=math.inf) == clip.Clipped(0.0, 1.0)
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    found = clip_gradients([Held(weight)], 5.0)
    assert (found.norm, found.coefficient) == (5.0, 1.0), "at the limit, nothing is clipped"
    assert weight.grad.tolist() == [3.0, 4.0]
    assert clip_gradients([Held(weight)], 2.5).coefficient == 0.5
    assert weight.grad.tolist() == [1.5, 2.0]


@pytest.mark.parametrize("p", [7.0, 100.0, 2000.0])
@pytest.mark.parametrize("size", [2.0**-140, 1.0, 2.0**120])
def test_high_powers_neither_overflow_nor_vanish(p: float, size: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([3.0, -4.0, 0.0]) * size
    expected = 4 * size * (1 + 0.75**p) ** (1 / p)
    assert math.isclose(clip_gradients([Held(weight)], math.inf, norm_type=p).norm, expected, rel_tol=1e-12)


def test_a_norm_beyond_all_numbers_is_infinite() -> None:
    """1000 elements of size 1, to the power 1000."""
    weight = torch.nn.Parameter(torch.zeros(1000))
    weight.grad = torch.ones(1000)
    assert clip_gradients([Held(weight)], 1.0, norm_type=1e-3, policy="skip").norm == math.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": -1.0}, r"limit is -1\.0: expected a number above 0"),
        ({"limit": 0.0}, r"limit is 0\.0"),
        ({"limit": math.nan}, "limit is nan"),
        ({"norm_type": -2.0}, r"norm_type is -2\.0"),
        ({"norm_type": 0.0}, r"norm_type is 0\.0"),
        ({"norm_type": math.nan}, "norm_type is nan"),
        ({"loss_scale": 0.0}, r"loss_scale is 0\.0"),
        ({"loss_scale": math.inf}, "loss_scale is inf: expected a finite number above 0"),
        ({"eps": math.nan}, "eps is nan: expected a finite number from 0"),
        ({"eps": -1.0}, r"eps is -1\.0"),
        ({"limit": "1"}, "limit is '1'"),
        ({"policy": "ignore"}, "policy is 'ignore': expected one of propagate, skip, raise"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(options: dict[str, Any], message: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([3.0])
    with pytest.raises(ValueError, match=message):
        clip_gradients([Held(weight)], **{"limit": 1.0, **options})
    assert weight.grad.item() == 3.0
