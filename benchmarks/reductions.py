"""What ranks run in traffic_picture.py: a module of its own, so that they import nothing else."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from sharded.all_reduce import all_reduce

ALGORITHMS = ("ring", "halving_doubling", "tree", "parameter_server")


def recorded(context: Any, elements: int) -> dict[str, tuple[int, int, float]]:
    """By algorithm: the bytes that this rank sends and receives for one fp32 tensor, as the recorder saw them, and the
    seconds that it took."""
    found = {}
    group = dist.group.WORLD
    for algorithm in ALGORITHMS:
        x = torch.ones(elements)
        dist.barrier()
        before, started = len(context.traffic.records()), time.perf_counter()
        total = all_reduce(x, group, algorithm=algorithm, check=False)
        seconds = time.perf_counter() - started
        assert torch.equal(total, torch.full_like(x, context.world_size))
        messages = context.traffic.records()[before:]
        sent, received = (sum(one.bytes for one in messages if one.operation == way) for way in ("send", "recv"))
        found[algorithm] = sent, received, seconds
    return found
