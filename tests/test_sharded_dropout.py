"""Random streams, dropout and recomputation on ranks: which masks are equal, and that no mask or bit changes."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_blocks import Block, gathered, mask_problems, normal, raises
from sharded_ranks import Check, run_world

from sharded.process_groups import ProcessGroups
from sharded.random import RandomTracker, dropout
from sharded.recompute import checkpoint
from sharded.transformer import TransformerLayer, finish_gradients


def streams(group: dist.ProcessGroup) -> list[str]:
    """Which ranks and seeds draw the same, that a state comes back, and that nothing shows outside."""
    before = torch.get_rng_state()
    tracker = RandomTracker(3, group)

    def draw(tracker: RandomTracker, name: Any) -> list[float]:
        with tracker.stream(name):
            return torch.rand(4).tolist()

    first, shard = draw(tracker, "replicated"), draw(tracker, "sharded")
    states = tracker.state()
    second = draw(tracker, "replicated")
    tracker.load(states)
    again = draw(tracker, "replicated")
    with tracker.stream("replicated"):
        inner = draw(tracker, "sharded")
        third = torch.rand(4).tolist()
    tracker.load({})
    other = RandomTracker(4, group)
    drawn = [first, second, third, shard, inner, draw(other, "replicated"), draw(other, "sharded")]
    problems = ["numbers are drawn twice"] * (len({tuple(numbers) for numbers in drawn}) < len(drawn))
    problems += ["a loaded state draws other numbers"] * (again != second)
    problems += ["an empty state does not start over"] * (draw(tracker, "replicated") != first)
    problems += ["replicated streams differ"] * any(one != first for one in gathered(first, group))
    problems += ["sharded streams are alike"] * (len({tuple(one) for one in gathered(shard, group)}) < group.size())
    problems += ["an unknown stream is not refused"] * (not raises(lambda: draw(tracker, "data"), "expected one of"))
    with tracker.stream("sharded"):
        problems += ["a stream in itself is not refused"] * (not raises(lambda: draw(tracker, "sharded"), "within"))
    try:
        with tracker.stream("sharded"):
            raise KeyError
    except KeyError:
        draw(tracker, "sharded")
    return problems + ["the default generator moved"] * (not torch.equal(before, torch.get_rng_state()))


def drops(group: dist.ProcessGroup) -> list[str]:
    """The share that is dropped, the scale of what stays, and the gradient, in every dtype."""
    problems = []
    n = 40000
    for dtype, p in itertools.product((torch.float64, torch.float32, torch.bfloat16, torch.float16), (0.1, 0.5)):
        tracker = RandomTracker(0, group)
        x = (1 + torch.rand(n, dtype=torch.float64)).to(dtype).requires_grad_()
        y = dropout(x, p, tracker, "sharded")
        y.backward(torch.ones_like(x))
        kept = y != 0
        share = kept.double().mean().item()
        scaled = (x.detach().double() / (1 - p)).to(dtype)
        if abs(share - (1 - p)) > 5 * (p * (1 - p) / n) ** 0.5:
            problems.append(f"{dtype} {p}: a share of {share} is kept")
        if not torch.allclose(y.double(), scaled.double() * kept, rtol=2 * torch.finfo(dtype).eps, atol=0):
            problems.append(f"{dtype} {p}: what is kept is not scaled")
        if not torch.equal(x.grad, (torch.ones_like(x) * (1 / (1 - p))) * kept):
            problems.append(f"{dtype} {p}: the gradient is not dropped alike")
    x = torch.ones(3)
    problems += ["p = 0 copies"] * (dropout(x, 0, tracker, "sharded") is not x)
    return problems


def run_twice(layer: TransformerLayer, case: Block, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Outputs and gradients of two micro-batches, both forward before both backward, as in a pipeline."""
    n = group.size() if case.option("sequence_parallel") else 1
    xs = [normal(f"x{m}", 8 // n, 2, case.hidden).to(case.dtype).requires_grad_() for m in range(2)]
    outputs = [layer(x, mask="causal") for x in xs]
    for y in outputs:
        y.backward(normal("g", *y.shape).to(case.dtype))
    finish_gradients(layer)
    gradients = [parameter.grad for parameter in layer.parameters()]
    return [*outputs, *(x.grad for x in xs), *gradients, *layer.tracker.state().values()]


def recomputation(group: dist.ProcessGroup) -> list[str]:
    """Bit for bit what is stored, the streams afterwards included; the default generator does not move."""
    problems = []
    for p, sp, dtype in itertools.product((0.0, 0.1, 0.5), (False, True), (torch.float64, torch.bfloat16)):
        results = {}
        for recompute in ("none", "selective", "full"):
            options = {"attention_dropout": p, "hidden_dropout": p, "sequence_parallel": sp, "recompute": recompute}
            case = Block(kv_heads=2, dtype=dtype, options={**options, "activation": "swiglu", "qk_norm": True})
            before = torch.get_rng_state()
            results[recompute] = run_twice(case.build(group, seed=5), case, group)
            if not torch.equal(before, torch.get_rng_state()):
                problems.append(f"{case}: the default generator moved")
        for recompute in ("selective", "full"):
            pairs = zip(results["none"], results[recompute], strict=True)
            wrong = [i for i, (stored, again) in enumerate(pairs) if not torch.equal(stored, again)]
            problems += [f"{recompute}, p {p}, {dtype}: tensors {wrong} differ"] * bool(wrong)
    return problems


def evaluation(group: dist.ProcessGroup) -> list[str]:
    """Nothing is dropped and nothing drawn where the layer is not training."""
    layer = Block(options={"attention_dropout": 0.5, "hidden_dropout": 0.5}).build(group).eval()
    plain = Block().build(group)
    x = normal("x", 4, 2, 16)
    problems = ["something is dropped"] * (not torch.equal(layer(x), plain(x)))
    return problems + ["something is drawn"] * bool(layer.tracker.state())


def masks(group: dist.ProcessGroup) -> list[str]:
    problems = []
    for p, q, sp, recompute in itertools.product((0.0, 0.5), (0.0, 0.1), (False, True), ("none", "full")):
        options = {"attention_dropout": p, "hidden_dropout": q, "sequence_parallel": sp, "recompute": recompute}
        problems += [f"{options}: {problem}" for problem in mask_problems(Block(options=options), group)]
    return problems


def memory(group: dist.ProcessGroup) -> list[str]:
    """What is between the input and the output does not outlive forward, and comes back where a graph is retained."""
    inner: list[weakref.ref[torch.Tensor]] = []
    tracker = RandomTracker(0, group)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        inner.append(weakref.ref(y))
        return dropout(y.sin(), 0.5, tracker, "sharded")

    x = torch.linspace(0, 1, 64, dtype=torch.float64).requires_grad_()
    stored = function(x)
    gc.collect()
    problems = [] if inner[-1]() is not None else ["what is stored is gone"]
    tracker.load({})
    y = checkpoint(function, x, tracker=tracker)
    gc.collect()
    problems += ["what is dropped is still there"] * (inner[-1]() is not None)
    with tracker.stream("sharded"):
        torch.rand(7)  # what comes between
    between = tracker.state()
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    (expected,) = torch.autograd.grad(stored.sum(), x)
    for name, gradient in (("first", first), ("second", second)):
        problems += [f"the {name} gradient differs"] * (not torch.equal(gradient, expected))
    moved = any(not torch.equal(state, between[key]) for key, state in tracker.state().items())
    problems += ["the streams moved in backward"] * moved
    return problems + [f"the function ran {len(inner)} times"] * (len(inner) != 4)


def on_ranks() -> Mapping[str, Check]:
    group = ProcessGroups([("tp", dist.get_world_size())]).group("tp")
    checks = (streams, drops, recomputation, evaluation, masks, memory)
    return {check.__name__: lambda check=check: check(group) for check in checks}


@pytest.mark.parametrize("world", [2, 4])
def test_dropout_on_ranks(world: int) -> None:
    found = run_world(world, on_ranks)
    wrong = {name: problems[:5] for name, problems in found.items() if problems}
    assert not wrong, wrong
