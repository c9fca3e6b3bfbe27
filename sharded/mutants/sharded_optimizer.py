"""Faults in the sharded optimizer: elements without an owner, wrong gradients, parameters that do not come back, and
states that are loaded wrongly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from sharded import sharded_optimizer
from sharded.flat_buffers import Cut
from sharded.mutants import Mutant, Patch
from sharded.sharded_optimizer import Buffer, ShardedOptimizer
from sharded.wire import padded


def _tail_lost() -> list[Patch]:
    def part(self: Cut) -> int:
        return self.total // self.owners

    def joined(self: Cut, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([x.reshape(-1) for x in tensors])[: self.owners * self.part]

    def tensors(self: Cut, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from padded(buffer, self.total).split_with_sizes(list(self.sizes))

    def hand_out(buffer: Buffer, flat: torch.Tensor) -> None:
        """Elements of the tail stay as they are."""
        left = flat.numel()
        for p, values in zip(buffer.parameters.values(), buffer.cut.tensors(flat), strict=True):
            p.view(-1)[:left] = values[:left]
            left = max(0, left - p.numel())

    return [
        (Cut, "part", property(part)),
        (Cut, "joined", joined),
        (Cut, "tensors", tensors),
        (sharded_optimizer, "hand_out", hand_out),
    ]


def _slice_off_by_one_parameter() -> list[Patch]:
    original = ShardedOptimizer._values

    def values(self: ShardedOptimizer, buffer: Buffer) -> torch.Tensor:
        """Every owner but the first begins one parameter too late."""
        rank, cut = self.group.rank(), buffer.cut
        if rank == 0 or len(cut.sizes) == 1:
            return original(self, buffer)
        flat = cut.joined([p.detach() for p in buffer.parameters.values()])
        return cut.own(flat.roll(-cut.sizes[0]), rank).clone()

    return [(ShardedOptimizer, "_values", values)]


def _averaged_twice() -> list[Patch]:
    original = ShardedOptimizer._reduced

    def reduced(self: ShardedOptimizer, buffer: Buffer) -> torch.Tensor:
        return original(self, buffer) / self._divide_by

    return [(ShardedOptimizer, "_reduced", reduced)]


def _straddling_not_gathered() -> list[Patch]:
    original = ShardedOptimizer._update

    def update(self: ShardedOptimizer, buffer: Buffer) -> None:
        """Of a parameter with several owners each of them changes its own elements, and no others come."""
        names, rank = list(buffer.parameters), self.group.rank()
        before = {i: buffer.parameters[names[i]].clone() for i in buffer.cut.straddling()}
        original(self, buffer)
        for i, old in before.items():
            start, stop = buffer.cut.owned(rank)[i]
            own = buffer.parameters[names[i]].view(-1)[start:stop].clone()
            buffer.parameters[names[i]].copy_(old).view(-1)[start:stop] = own

    return [(ShardedOptimizer, "_update", update)]


def _loaded_by_the_old_size() -> list[Patch]:
    original = ShardedOptimizer.load

    def load(self: ShardedOptimizer, saved: Mapping[str, Any]) -> None:
        original(self, saved)
        for buffer in self._buffers:
            old = replace(buffer.cut, owners=saved["owners"])
            for kind, part in buffer.state.items():
                whole = old.joined([saved["parameters"][name][kind] for name in buffer.parameters])
                at = min(self.group.rank() * old.part, whole.numel())
                part.copy_(padded(whole[at : at + min(old.part, part.numel())], part.numel()))

    return [(ShardedOptimizer, "load", load)]


def _one_dtype_skipped() -> list[Patch]:
    original = ShardedOptimizer._update

    def update(self: ShardedOptimizer, buffer: Buffer) -> None:
        if buffer is self._buffers[0]:
            original(self, buffer)

    return [(ShardedOptimizer, "_update", update)]


def _steps_not_restored() -> list[Patch]:
    original = ShardedOptimizer.load

    def load(self: ShardedOptimizer, saved: Mapping[str, Any]) -> None:
        original(self, {**saved, "steps": 0})

    return [(ShardedOptimizer, "load", load)]


MUTANTS = (
    Mutant("F53", "sharded_optimizer", "the padded tail of a flat buffer has no owner", "own", _tail_lost),
    Mutant(
        "F54",
        "sharded_optimizer",
        "the owner's part of the parameters begins one parameter too late",
        "own",
        _slice_off_by_one_parameter,
    ),
    Mutant("F55", "sharded_optimizer", "gradients are averaged twice", "own", _averaged_twice),
    Mutant(
        "F56",
        "sharded_optimizer",
        "a parameter that straddles owners is updated and not gathered",
        "own",
        _straddling_not_gathered,
    ),
    Mutant(
        "F57",
        "sharded_optimizer",
        "a state that is loaded at another size is cut by the old size",
        "own",
        _loaded_by_the_old_size,
    ),
    Mutant("F58", "sharded_optimizer", "only the buffer of one dtype is updated", "own", _one_dtype_skipped),
    Mutant("F59", "sharded_optimizer", "the number of steps is not restored from a state", "own", _steps_not_restored),
)
