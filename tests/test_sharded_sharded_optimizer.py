"""The shipped sharded optimizer: cuts and updates by themselves, and on ranks what the harness does not ask."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_ranks import Check, Traffic, integers, run_world, same
from test_sharded_data_parallel import error_of
from test_sharded_mutants import with_fault

from sharded import mutants
from sharded.flat_buffers import Cut
from sharded.saved_state import require_fits
from sharded.sharded_optimizer import ShardedOptimizer
from sharded.updates import SGD, AdamW, Rule


@pytest.mark.parametrize("sizes", [(1,), (3, 1, 4), (1, 1), (17, 2), (2, 2, 2, 2), (1, 9, 1)])
@pytest.mark.parametrize("owners", [1, 2, 3, 5])
def test_every_element_has_one_owner_and_parts_are_of_one_length(sizes: tuple[int, ...], owners: int) -> None:
    cut = Cut(sizes, owners)
    tensors = [torch.arange(float(size)) + 100 * i for i, size in enumerate(sizes)]
    flat = cut.joined(tensors)
    assert flat.numel() == owners * cut.part < cut.total + owners
    assert not flat[cut.total :].any()
    assert all(torch.equal(a, b) for a, b in zip(cut.tensors(flat), tensors, strict=True))
    for i, tensor in enumerate(tensors):
        pieces = [cut.owned(owner)[i] for owner in range(owners)]
        assert torch.equal(torch.cat([tensor[start:stop] for start, stop in pieces]), tensor)
        assert (sum(stop > start for start, stop in pieces) > 1) == (i in cut.straddling())
    for owner in range(owners):
        own = torch.cat([x[start:stop] for x, (start, stop) in zip(tensors, cut.owned(owner), strict=True)])
        assert torch.equal(cut.own(flat, owner)[: own.numel()], own)


OPTIMIZERS: list[tuple[Rule, Callable[..., torch.optim.Optimizer]]] = [
    (SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    (SGD(0.1, 0.9, 0.01), lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01)),
    (AdamW(0.1), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.0)),
    (
        AdamW(0.01, (0.8, 0.95), 1e-3, 0.1),
        lambda p: torch.optim.AdamW(p, 0.01, (0.8, 0.95), 1e-3, weight_decay=0.1),
    ),
]


@pytest.mark.parametrize(("rule", "theirs"), OPTIMIZERS)
def test_updates_are_those_of_torch(rule: Rule, theirs: Callable[..., torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    values = torch.randn(5, dtype=torch.float64)
    parameter = torch.nn.Parameter(values.clone())
    optimizer = theirs([parameter])
    state = {name: torch.zeros_like(values) for name in rule.states}
    for step in range(1, 4):
        gradient = torch.randn(5, dtype=torch.float64)
        parameter.grad = gradient.clone()
        optimizer.step()
        rule.update(values, gradient, state, step)
        torch.testing.assert_close(values, parameter.detach(), rtol=1e-14, atol=0)


SAVED: dict[str, Any] = {
    "rule": "SGD",
    "steps": 1,
    "shapes": {"a": (2,)},
    "parameters": {"a": {"momentum": torch.zeros(2)}},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "AdamW"}, "the state is of AdamW, and the optimizer is SGD"),
        ({"shapes": {}}, "the state has no parameter 'a', which trains: it has none"),
        ({"shapes": {"a": (2,), "b": (1,)}}, "the state has a parameter 'b', which does not train here: expected a"),
        ({"shapes": {"a": (3,)}}, r"parameter 'a' has shape \(3,\) in the state: expected \(2,\)"),
        ({"parameters": {"a": {}}}, "the state keeps nothing for parameter 'a': expected momentum"),
        ({"parameters": {"a": {"master": 0, "momentum": 0}}}, "keeps master, momentum for parameter 'a'"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    due = {"a": ((2,), ("momentum",))}
    require_fits(SAVED, "SGD", due)
    with pytest.raises(ValueError, match=message):
        require_fits({**SAVED, **changes}, "SGD", due)


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(ValueError, match="this is no saved state, 'rule' is missing: pass what save"):
        require_fits({}, "SGD", {})


SHAPES: dict[str, tuple[int, ...]] = {"w": (2, 3), "s": (), "b": (5,)}


def parameters(seed: str = "") -> dict[str, torch.nn.Parameter]:
    made = {name: torch.nn.Parameter(integers(name + seed, *shape)) for name, shape in SHAPES.items()}
    frozen = torch.nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
    low = torch.nn.Parameter(integers(f"low{seed}", 3).to(torch.bfloat16))
    return {**made, "frozen": frozen, "low": low}


def set_gradients(of: Mapping[str, torch.nn.Parameter], step: int, rank: int) -> None:
    for name, p in of.items():
        if p.requires_grad:
            p.grad = integers(f"{name} {step} {rank}", *p.shape).to(p.dtype)


def steps_problems(group: dist.ProcessGroup, rule: Rule, load_at: int | None = None, steps: int = 3) -> list[str]:
    """Whole numbers, summed: against the same rule on the sum, in one process."""
    n, rank = group.size(), group.rank()
    ours, whole, problems = parameters(), parameters(), list[str]()
    optimizer = ShardedOptimizer(ours.items(), group, rule, reduction="sum")
    states = {name: {kind: torch.zeros_like(p) for kind in rule.states} for name, p in whole.items()}
    for step in range(steps):
        if step == load_at:
            saved = copy.deepcopy(optimizer.save())
            optimizer = ShardedOptimizer(ours.items(), group, rule, reduction="sum")
            optimizer.load(saved)
        set_gradients(ours, step, rank)
        before = {name: p.grad.clone() for name, p in ours.items() if p.grad is not None}
        optimizer.step()
        for name, gradient in before.items():
            problems += same(f"the gradient of {name}", ours[name].grad, gradient)
        for name, p in whole.items():
            if p.requires_grad:
                each = [integers(f"{name} {step} {r}", *p.shape).to(p.dtype) for r in range(n)]
                with torch.no_grad():
                    rule.update(p, torch.stack(each).sum(0), states[name], step + 1)
        for name, p in ours.items():
            problems += same(f"{name} after step {step}", p.detach(), whole[name].detach())
    return problems


def master_problems(group: dist.ProcessGroup) -> list[str]:
    """Steps that bf16 rounds away add up in fp32."""
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = ShardedOptimizer([("p", p)], group, SGD(2.0**-10), master_weights=True)
    for _ in range(2**8):
        p.grad = torch.ones(3, dtype=torch.bfloat16)
        optimizer.step()
    kept = optimizer.state()["p"]["master"]
    problems = [] if bool((kept == 0.75).all()) and kept.dtype == torch.float32 else [f"the master is {kept}"]
    return problems + ([] if bool((p == 0.75).all()) else [f"the parameter is {p}"])


def traffic_problems(group: dist.ProcessGroup) -> list[str]:
    """One reduce-scatter and one all-gather for each dtype; nothing else, and nothing to load."""
    n = group.size()
    optimizer = ShardedOptimizer(parameters().items(), group, SGD(0.5))
    with Traffic() as traffic:
        optimizer.step()
    part, low = -(-12 // n), -(-3 // n)
    found = [size for _, size in traffic.calls]
    saved = optimizer.save()
    with Traffic() as loading:
        optimizer.load(saved)
    problems = [f"loading sends {loading.calls}"] if loading.calls else []
    expected = [n * part, part, n * low, low]
    return problems + ([] if found == expected else [f"a step sends {traffic.calls}, expected {expected}"])


def refused(make: Callable[[], object], words: list[str]) -> list[str]:
    said = error_of(make)
    return [f"{word!r} is not in {said!r}" for word in words if word not in said]


def state_kept(group: dist.ProcessGroup) -> list[str]:
    """A load that is refused changes nothing."""
    optimizer = ShardedOptimizer(parameters().items(), group, SGD(0.5, 0.5))
    optimizer.step()
    before, saved = copy.deepcopy(optimizer.state()), optimizer.save()
    del saved["shapes"]["b"]
    said = error_of(lambda: optimizer.load(saved))
    problems = [] if "no parameter 'b'" in said else [said]
    for name, kept in optimizer.state().items():
        problems += same(name, kept["momentum"], before[name]["momentum"])
    return problems


def on_ranks() -> Mapping[str, Check]:
    group, n = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    last = group.rank() == n - 1
    plain, momentum = SGD(1.0), SGD(1.0, 0.5)

    def make(changed: dict[str, Any] | None = None, rule: Rule = plain, **options: Any) -> Callable[[], object]:
        given = parameters() if changed is None or not last else changed
        return lambda: ShardedOptimizer(given.items(), group, rule, **options)

    own = parameters()
    who, first = f"rank {n - 1} differs from rank 0", "rank 0 has"
    wide = {**own, "low": torch.nn.Parameter(torch.zeros(3))}
    long = {**own, "s": torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))}
    more = {**own, "x": torch.nn.Parameter(torch.zeros(1))}
    two = [("p", own["w"]), ("p", own["b"])]
    frozen = [("frozen", own["frozen"])]
    checks: dict[str, Check] = {
        "plain": lambda: steps_problems(group, plain),
        "momentum": lambda: steps_problems(group, momentum),
        "loads": lambda: steps_problems(group, momentum, load_at=1),
        "master": lambda: master_problems(group),
        "traffic": lambda: traffic_problems(group),
        "a load that fails": lambda: state_kept(group),
        "number": lambda: refused(make(more), [who, "6 parameters", "has 5"]),
        "shape": lambda: refused(make(long), [who, "s (2,)", first]),
        "dtype": lambda: refused(make(wide), [who, "torch.float32", "torch.bfloat16"]),
        "order": lambda: refused(make(dict(reversed(own.items()))), [who, "in the order of its parameters"]),
        "rule": lambda: refused(make(rule=SGD(1.0 + last)), [who, "SGD(lr=2.0"]),
        "options": lambda: refused(make(master_weights=bool(last)), [who, "master_weights=True"]),
        "reduction": lambda: refused(make(reduction="max"), ["reduction 'max': expected 'average' or 'sum'"]),
        "nothing": lambda: refused(lambda: ShardedOptimizer([], group, plain), ["none of 0 parameters trains"]),
        "all frozen": lambda: refused(lambda: ShardedOptimizer(frozen, group, plain), ["none of 1 parameters trains"]),
        "one name": lambda: refused(lambda: ShardedOptimizer(two, group, plain), ["two parameters have one name"]),
        # Three ranks divide everything.
        f"F53 {'shows' if n == 2 else 'hides'}": with_fault("F53", lambda: steps_problems(group, plain)),
        "F54 shows": with_fault("F54", lambda: steps_problems(group, plain)),
        "F56 shows": with_fault("F56", lambda: steps_problems(group, plain)),
        "F58 shows": with_fault("F58", lambda: steps_problems(group, plain)),
        "F55 hides": with_fault("F55", lambda: steps_problems(group, plain)),  # it sums
        "F57 hides": with_fault("F57", lambda: steps_problems(group, momentum, load_at=1)),  # at the same size
        "F59 hides": with_fault("F59", lambda: steps_problems(group, momentum, load_at=1)),  # SGD does not count
    }
    return checks | {f"again, {name}": checks[name] for name in ("plain", "momentum", "loads")}


@pytest.mark.parametrize("world", [2, 3])
def test_steps_states_and_refusals_on_ranks(world: int) -> None:
    for name, problems in run_world(world, on_ranks).items():
        if "shows" in name:
            assert problems, f"{name} is not seen"
        else:
            assert not problems, (name, problems)


def test_the_registry_has_them() -> None:
    of_the_subject = {mutant.id for mutant in mutants.all_mutants() if mutant.subject == "sharded_optimizer"}
    assert of_the_subject == {f"F{number}" for number in range(53, 60)}
