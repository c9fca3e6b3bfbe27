"""Tensors laid end to end in one buffer that is cut evenly over owners: every element has exactly one.

The buffer ends with padding, so that the owners' parts are of one length. A tensor may straddle owners. (Partitioning
of optimizer states: Rajbhandari et al., "ZeRO", SC 2020, section 5.1.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sharded.wire import padded


@dataclass(frozen=True)
class Cut:
    """sizes: the elements of each tensor, in order. owners: how many share them."""

    sizes: tuple[int, ...]
    owners: int

    @property
    def total(self) -> int:
        """Elements without padding."""
        return sum(self.sizes)

    @property
    def part(self) -> int:
        """Elements of each owner, padding included."""
        return -(-self.total // self.owners)

    def joined(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensors, of any shapes, as a new buffer [owners * part]."""
        return padded(torch.cat([x.reshape(-1) for x in tensors]), self.owners * self.part)

    def own(self, buffer: torch.Tensor, owner: int) -> torch.Tensor:
        """The owner's part of a buffer, [part], a view."""
        return buffer.narrow(0, owner * self.part, self.part)

    def tensors(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Each tensor's elements in a buffer [at least total], flat views."""
        yield from buffer[: self.total].split_with_sizes(list(self.sizes))

    def owned(self, owner: int) -> list[tuple[int, int]]:
        """Of each tensor, in its own elements, the range (start, stop) that is the owner's; empty where none is."""
        begin, end = owner * self.part, (owner + 1) * self.part
        found, at = [], 0
        for size in self.sizes:
            start = min(max(begin - at, 0), size)
            found.append((start, max(start, min(end - at, size))))
            at += size
        return found

    def straddling(self) -> list[int]:
        """The tensors, by index, that have more than one owner."""
        owners = [0] * len(self.sizes)
        for owner in range(self.owners):
            for index, (start, stop) in enumerate(self.owned(owner)):
                owners[index] += stop > start
        return [index for index, count in enumerate(owners) if count > 1]
