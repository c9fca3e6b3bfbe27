"""The shipped data parallelism: buckets and normalisation by themselves, and on ranks what the harness does not ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_ranks import Check, Traffic, integers, run_world, same
from test_sharded_mutants import with_fault
from torch import nn

from sharded import loss_normalization, mutants
from sharded.buckets import Bucket, plan, sent_in
from sharded.data_parallel import DistributedDataParallel

FP32 = torch.float32


@pytest.mark.parametrize(
    ("sizes", "most", "buckets"),
    [
        ([1, 1, 1], 2, [[2, 1], [0]]),
        ([1, 1, 1], 100, [[2, 1, 0]]),
        ([5, 1, 1], 2, [[2, 1], [0]]),
        ([1, 5, 1], 2, [[2], [1], [0]]),
        ([2, 2], 1, [[1], [0]]),
        ([], 1, []),
    ],
)
def test_buckets_are_filled_in_order_and_a_large_parameter_has_its_own(
    sizes: list[int], most: int, buckets: list[list[int]]
) -> None:
    assert plan(sizes, [FP32] * len(sizes), range(len(sizes))[::-1], most) == buckets


def test_dtypes_do_not_share_a_bucket() -> None:
    assert plan([1, 1, 1], [FP32, torch.bfloat16, FP32], [0, 2, 1], 10) == [[0, 2], [1]]


@pytest.mark.parametrize("most", [0, -1])
def test_a_bucket_holds_something(most: int) -> None:
    with pytest.raises(ValueError, match=f"a bucket of {most} elements holds no gradient: expected at least 1"):
        plan([1], [FP32], [0], most)


def test_members_have_their_places() -> None:
    bucket = Bucket.of([1, 0], [2, 3], FP32, torch.device("cpu"))
    bucket.flat.copy_(torch.arange(5.0))
    assert bucket.view(1, torch.Size([3, 1])).tolist() == [[0], [1], [2]]
    assert bucket.view(0, torch.Size([2])).tolist() == [3, 4]


def test_gradients_are_sent_in_what_is_asked() -> None:
    assert sent_in(torch.bfloat16, None) is torch.bfloat16
    assert sent_in(torch.bfloat16, FP32) is FP32


def test_an_unknown_normalisation_is_refused() -> None:
    with pytest.raises(ValueError, match="loss normalisation 'mean': expected 'token_mean', 'sample_mean' or 'sum'"):
        loss_normalization.divisor([], "mean", None)  # type: ignore[arg-type]


class Net(nn.Module):
    """Layers beside each other, of which a call uses some, in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, out, dtype=torch.float64) for out in (1, 3, 2)])
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                parameter.copy_(integers(name, *parameter.shape))

    def forward(self, x: torch.Tensor, used: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        return sum((self.layers[i](x).square().sum() for i in used), torch.zeros((), dtype=torch.float64))


#: The layers that a rank uses in a micro-batch.
Used = Callable[[int, int], tuple[int, ...]]


@dataclass(frozen=True)
class Steps:
    """What is trained: micro-batches of two steps, whole numbers that sum exactly."""

    options: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: int = 2
    used: Used = lambda rank, m: (0, 1, 2)
    every: bool = False
    to_none: bool = True
    late_zero: bool = False


def steps_problems(steps: Steps, group: dist.ProcessGroup) -> list[str]:
    """Trains on this rank, and beside it one process on everything; what differs."""
    n, rank, problems = group.size(), group.rank(), []
    options = {"reduction": "sum", "bucket_elements": 3, **steps.options}
    net, whole = Net(), Net()
    wrapped = DistributedDataParallel(net, group, **options)
    for step in range(2):
        net.zero_grad(set_to_none=steps.to_none)
        whole.zero_grad()
        for m in range(steps.micro_batches):
            syncs = steps.every or m == steps.micro_batches - 1
            xs = [integers(f"{step} {m} {r}", 3, 2) for r in range(n)]
            if syncs:
                loss = wrapped(xs[rank], steps.used(rank, m))
                if steps.late_zero and m == 0:
                    net.zero_grad(set_to_none=steps.to_none)
                loss.backward()
                wrapped.finish()
            else:
                with wrapped.no_sync():
                    wrapped(xs[rank], steps.used(rank, m)).backward()
            for r in range(n):
                whole(xs[r], steps.used(r, m)).backward()
        for (name, ours), theirs in zip(net.named_parameters(), whole.parameters(), strict=True):
            right = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            problems += same(f"{name} in step {step}", ours.grad, right)
    wrapped.close()
    hooks = [name for name, p in net.named_parameters() if p._post_accumulate_grad_hooks]  # type: ignore[attr-defined]
    return problems + [f"{name} keeps a hook" for name in hooks]


VIEWS, LATE = {"gradient_as_view": True}, {"overlap": False}
some: Used = lambda rank, m: (0, 1) if (rank + m) % 2 else (2, 0)  # noqa: E731
turned: Used = lambda rank, m: ((0, 1, 2), (2, 1, 0))[rank % 2]  # noqa: E731

RIGHT = {
    "plain": Steps(),
    "one bucket": Steps({"bucket_elements": 100}),
    "views": Steps(VIEWS),
    "no overlap": Steps(LATE),
    "orders": Steps(used=turned),
    "orders, views": Steps(VIEWS, used=turned),
    "some": Steps(used=some),
    "some, views": Steps(VIEWS, used=some),
    "never": Steps(used=lambda rank, m: (0,)),
    "never, one bucket": Steps({"bucket_elements": 100}, used=lambda rank, m: (0,)),
    "only in the first micro-batch": Steps(used=lambda rank, m: (0, 1) if m == 0 else (0,)),
    "every": Steps(every=True),
    "every, some, views": Steps(VIEWS, every=True, used=some),
    "zeroed in place": Steps(to_none=False),
    "zeroed in place, views": Steps(VIEWS, to_none=False, every=True),
    "zeroed between forward and backward": Steps(micro_batches=1, late_zero=True),
    "zeroed in place between forward and backward": Steps(micro_batches=1, late_zero=True, to_none=False),
}

#: By mutant of the wrapper: where it shows, and where it hides.
SHOWS = {"F39": ["plain", "orders, views"], "F40": ["never, one bucket", "some, views"], "F43": ["plain", "views"]}
HIDES = {
    "F39": [Steps(micro_batches=1)],
    "F40": [Steps(), Steps(VIEWS, used=turned), RIGHT["never"]],
    "F43": [Steps(micro_batches=1), Steps(micro_batches=1, every=True)],
}


def loss_problems(kind: Any, counts: list[list[int]], group: dist.ProcessGroup) -> list[str]:
    """The share of each rank, of one micro-batch with a sample of so many tokens for each count, against all of it."""
    masks = [torch.arange(4) < torch.tensor(own).unsqueeze(-1) for own in counts]
    tokens = [integers(f"loss {r}", len(own), 4) for r, own in enumerate(counts)]
    mine = tokens[group.rank()].requires_grad_()
    of_batch = loss_normalization.divisor([masks[group.rank()]], kind, group)
    share = loss_normalization.share(mine, masks[group.rank()], kind, of_batch)
    share.backward()  # type: ignore[no-untyped-call]
    total = loss_normalization.over_ranks(share.detach(), group)
    valid, flat = torch.cat(masks), torch.cat([one.detach() for one in tokens])
    if kind == "token_mean":
        weights = valid / valid.sum().clamp(min=1)
    elif kind == "sample_mean":
        weights = valid / valid.sum(-1, keepdim=True).clamp(min=1) / valid.any(-1).sum().clamp(min=1)
    else:
        weights = valid.double()
    problems = []
    if not torch.allclose(total, (flat * weights).sum(), rtol=0, atol=2.0**-20):  # weights are fp32 quotients
        problems.append(f"{kind} is {total}, expected {(flat * weights).sum()}")
    rows = sum(len(own) for own in counts[: group.rank()])
    own = weights[rows : rows + len(counts[group.rank()])].double()
    assert mine.grad is not None
    if not torch.allclose(mine.grad, own, rtol=0, atol=2.0**-20):
        problems.append(f"the gradient of {kind} is {mine.grad.tolist()}, expected {own.tolist()}")
    return problems


UNEVEN = {2: [[1, 3], [3, 0]], 3: [[1, 3], [3, 0], [2, 2]]}
ONE_EMPTY = {2: [[1, 3], [0, 0]], 3: [[1, 3], [0, 0], [2, 2]]}
EVEN, NOTHING = {n: [[2, 2]] * n for n in (2, 3)}, {n: [[0, 0]] * n for n in (2, 3)}


def traffic_problems(group: dist.ProcessGroup) -> list[str]:
    """One all-reduce a bucket, in the order of the plan, and none without sync; the order of use is told once."""
    wrapped, problems = DistributedDataParallel(Net(), group, bucket_elements=3), []
    first = [("allreduce", size) for size in (2, 4, 3, 6, 1 + 2)] + [("broadcast", 6)]
    for step in range(2):
        with Traffic() as traffic:
            with wrapped.no_sync():
                wrapped(torch.ones(1, 2, dtype=torch.float64)).backward()
            problems += [f"without sync there is {traffic.calls}"] if traffic.calls else []
            wrapped(torch.ones(1, 2, dtype=torch.float64)).backward()
            wrapped.finish()
        if step == 0 and traffic.calls != first:
            problems.append(f"the first step sends {traffic.calls}, expected {first}")
        if step == 1 and (sum(size for _, size in traffic.calls) != 18 or len(traffic.calls) > 6):
            problems.append(f"the second step sends {traffic.calls}, expected 18 elements in buckets of 3")
    return problems


def error_of(make: Callable[[], object]) -> str:
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def refused(change: Callable[[Net], Any], words: list[str], group: dist.ProcessGroup, **options: Any) -> list[str]:
    """What is missing in the error of this rank, where the last rank's module was changed."""
    net = Net()
    if group.rank() == group.size() - 1:
        change(net)
    said = error_of(lambda: DistributedDataParallel(net, group, **options))
    return [f"{word!r} is not in {said!r}" for word in words if word not in said]


def _narrow(net: Net) -> None:
    net.layers[1] = nn.Linear(2, 1, dtype=torch.float64)


def _reorder(net: Net) -> None:
    net.layers = nn.ModuleList([net.layers[i] for i in (0, 1, 2)])
    net.layers._modules["0"] = net.layers._modules.pop("0")  # to the end


def on_ranks() -> Mapping[str, Check]:
    group, n = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    last, first = f"rank {n - 1} differs from rank 0", "rank 0 has"
    checks: dict[str, Check] = {name: lambda s=s: steps_problems(s, group) for name, s in RIGHT.items()}
    for mutant, shown in SHOWS.items():
        for name in shown:
            checks[f"{mutant} shows, {name}"] = with_fault(mutant, lambda s=RIGHT[name]: steps_problems(s, group))
        for i, steps in enumerate(HIDES[mutant]):
            checks[f"{mutant} hides {i}"] = with_fault(mutant, lambda s=steps: steps_problems(s, group))
    for name, counts in {"uneven": UNEVEN, "one empty": ONE_EMPTY, "even": EVEN, "nothing": NOTHING}.items():
        for kind in ("token_mean", "sample_mean", "sum"):
            check = lambda k=kind, c=counts[n]: loss_problems(k, c, group)  # noqa: E731
            checks[f"{kind}, {name}"] = check
            if kind == "token_mean":
                checks[f"F41 {'hides' if name in ('even', 'nothing') else 'shows'} {name}"] = with_fault("F41", check)
                checks[f"F42 {'shows' if name in ('one empty', 'nothing') else 'hides'} {name}"] = with_fault(
                    "F42", check
                )
    checks["traffic"] = lambda: traffic_problems(group)
    freeze = lambda net: net.layers[0].weight.requires_grad_(False)  # noqa: E731
    same_ = lambda net: None  # noqa: E731
    own = 1 + (group.rank() == n - 1)
    checks |= {
        "number": lambda: refused(
            lambda net: net.layers.append(nn.Linear(1, 1)), [last, "8 parameters", "has 6"], group
        ),
        "shape": lambda: refused(_narrow, [last, "(1, 2)", "(3, 2)", first], group),
        "dtype": lambda: refused(lambda net: net.float(), [last, "torch.float32", "torch.float64", first], group),
        "order": lambda: refused(_reorder, [last, "in the order of its parameters"], group),
        "frozen": lambda: refused(freeze, [last, "layers.0.weight", "frozen"], group),
        "options": lambda: refused(same_, [last, "bucket_elements"], group, bucket_elements=own),
        "bucket": lambda: refused(same_, ["ValueError: a bucket of 0 elements"], group, bucket_elements=0),
        "reduction": lambda: refused(
            same_, ["ValueError: reduction 'max': expected 'average' or 'sum'"], group, reduction="max"
        ),
        "group": lambda: not_a_member(n),
        "forward before finish": lambda: forward_too_early(group),
    }
    return checks


def not_a_member(n: int) -> list[str]:
    """Ranks in the group build it, and the last, which is not in it, is told."""
    some = dist.new_group(list(range(n - 1)))
    said = error_of(lambda: DistributedDataParallel(Net(), some))  # type: ignore[arg-type]
    if dist.get_rank() < n - 1:
        return [] if said == "nothing raised" else [said]
    return [] if f"rank {n - 1} is not in the group" in said else [said]


def forward_too_early(group: dist.ProcessGroup) -> list[str]:
    wrapped = DistributedDataParallel(Net(), group)
    x = torch.ones(1, 2, dtype=torch.float64)
    wrapped(x).backward()
    said = error_of(lambda: wrapped(x))
    wrapped.finish()
    wrapped(x)
    return [] if "call finish() before the next forward" in said else [said]


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_losses_and_refusals_on_ranks(world: int) -> None:
    for name, problems in run_world(world, on_ranks).items():
        if "shows" in name:
            assert problems, f"{name} is not seen"
        else:
            assert not problems, (name, problems)


def test_the_registry_has_them() -> None:
    of_the_subject = {mutant.id for mutant in mutants.all_mutants() if mutant.subject == "data_parallel"}
    assert of_the_subject == {"F39", "F40", "F41", "F42", "F43", "F44"}


def test_a_mutant_that_is_not_applied_leaves_no_trace() -> None:
    before = dict(vars(DistributedDataParallel))
    with mutants.applied("F40"):
        assert vars(DistributedDataParallel)["finish"] is not before["finish"]
    assert dict(vars(DistributedDataParallel)) == before
