"""Runs the schedules of `sharded` for all ranks in one process, and counts what they send.

A message is a copy, handed over when its receiver asks for it; a rank that asks for what nobody sends ends the run with
an error instead of a hang.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sharded.schedule import Exchange, Schedule


@dataclass
class Wire:
    """What went over it: bytes by (sender, receiver)."""

    bytes: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))

    def sent(self, rank: int) -> int:
        return sum(count for (sender, _), count in self.bytes.items() if sender == rank)

    def received(self, rank: int) -> int:
        return sum(count for (_, receiver), count in self.bytes.items() if receiver == rank)


def run(schedules: Sequence[Schedule]) -> Wire:
    """Runs one schedule a rank to their ends. Raises RuntimeError where they wait for each other, send to themselves or
    leave a message, or where a message is not of the length and dtype that its receiver expects."""
    wire = Wire()
    boxes: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
    waiting: dict[int, Exchange] = {}

    def step(rank: int) -> None:
        exchange = next(schedules[rank], None)
        if exchange is None:
            waiting.pop(rank, None)
            return
        waiting[rank] = exchange
        for peer, memory in exchange.sends:
            if peer == rank:
                raise RuntimeError(f"rank {rank} sends to itself")
            if memory.numel():
                boxes[rank, peer].append(memory.clone())
                wire.bytes[rank, peer] += memory.numel() * memory.element_size()

    def ready(rank: int) -> bool:
        return all(boxes[peer, rank] for peer, memory in waiting[rank].receives if memory.numel())

    for rank in range(len(schedules)):
        step(rank)
    while waiting:
        able = [rank for rank in waiting if ready(rank)]
        if not able:
            raise RuntimeError(f"ranks {sorted(waiting)} wait for each other")
        for rank in able:
            for peer, memory in waiting[rank].receives:
                if memory.numel():
                    came = boxes[peer, rank].popleft()
                    if came.shape != memory.shape or came.dtype != memory.dtype:
                        raise RuntimeError(f"rank {rank} expects {memory.shape}, and {peer} sends {came.shape}")
                    memory.copy_(came)
            step(rank)
    left = [link for link, box in boxes.items() if box]
    if left:
        raise RuntimeError(f"messages are left on {left}")
    return wire
