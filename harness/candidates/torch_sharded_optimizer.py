"""PyTorch's ZeroRedundancyOptimizer, as the candidate ``torch`` offers it: whole parameters have owners, who broadcast
them. It leaves the reduction of gradients to DistributedDataParallel; an all-reduce for each stands for that here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from harness.sharded_optimizer import ShardedOptimizer
from reference.sharded_optimizer import ShardedOptimizerCase
from reference.traffic import Operation, Transfer, worth_sending

#: It wants parameters of one dtype, keeps its state in theirs, and checks neither them on other ranks nor a state.
ZERO_FEATURES = (
    "sharded_optimizer_any_axis",
    "sharded_optimizer_adamw",
    "sharded_optimizer_sum",
    "sharded_optimizer_frozen",
    "sharded_optimizer_missing",
    "sharded_optimizer_load",
    "sharded_optimizer_load_other_size",
)
_KEYS = {"momentum": "momentum_buffer"}


def zero_redundancy(
    case: ShardedOptimizerCase, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup
) -> ShardedOptimizer:
    """A ZeroRedundancyOptimizer of the parameters that train."""
    trained = [p for p in parameters.values() if p.requires_grad]
    divide_by = group.size() if case.reduction == "average" else 1
    options: dict[str, Any] = {"lr": case.lr, "weight_decay": case.weight_decay}
    if case.optimizer == "adamw":
        kind: Any = torch.optim.AdamW
        options |= {"betas": case.betas, "eps": case.eps}
    else:
        kind = torch.optim.SGD
        options |= {"momentum": case.momentum}
    made = ZeroRedundancyOptimizer(trained, kind, process_group=group, **options)

    def step() -> None:
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            if group.size() > 1:
                dist.all_reduce(p.grad.div_(divide_by), group=group)
        made.step()

    def owned(name: str) -> list[tuple[int, int]]:
        own = (p for one in made.optim.param_groups for p in one["params"])
        return [(0, p.numel()) for p in own if p is parameters[name]]

    def state(name: str, kind: str) -> torch.Tensor:
        p = parameters[name]
        found: torch.Tensor = made.optim.state[p][_KEYS.get(kind, kind)] if owned(name) else p.new_zeros(0)
        return found.reshape(-1)

    def save() -> dict[str, Any]:
        saved: dict[str, Any] = {}
        for rank in range(group.size()):
            made.consolidate_state_dict(to=rank)
            if rank == group.rank():  # the next call forgets it
                saved = made.state_dict()
        return saved

    return ShardedOptimizer(step, owned=owned, state=state, save=save, load=made.load_state_dict)


def all_reduces_and_broadcasts(case: ShardedOptimizerCase) -> Sequence[Transfer]:
    """One of each for every parameter that trains, in each step."""
    operations: tuple[Operation, ...] = ("all_reduce", "broadcast")
    made = [
        Transfer("finish", step, what, case.axis_at(step), case.parameters[i].elements, _dtype(case))
        for step in range(case.steps)
        for i in case.trained
        for what in operations
    ]
    return worth_sending(made, case.mesh)


def _dtype(case: ShardedOptimizerCase) -> str:
    return str(case.format.torch_dtype).removeprefix("torch.")
