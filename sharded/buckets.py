"""Which gradients are reduced together: buckets, in the reverse order of use, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def plan(sizes: Sequence[int], dtypes: Sequence[torch.dtype], order: Sequence[int], most: int) -> list[list[int]]:
    """The parameters of each bucket, by index. order: of the parameters; most: elements of a bucket. A parameter that
    is larger has a bucket to itself, the last one may be smaller, and dtypes are kept apart.

    Raises ValueError unless ``most`` is at least 1.
    """
    if most < 1:
        raise ValueError(f"a bucket of {most} elements holds no gradient: expected at least 1")
    made: list[list[int]] = []
    room = 0
    for index in order:
        if not made or sizes[index] > room or dtypes[index] != dtypes[made[-1][0]]:
            made.append([])
            room = most
        made[-1].append(index)
        room -= sizes[index]
    return made


def sent_in(dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """The format in which a gradient of ``dtype`` is reduced."""
    return dtype if asked is None else asked


@dataclass
class Bucket:
    """Gradients of some parameters, joined in one tensor. members: their indices, each with its place in ``flat``.

    ``flat`` is in the dtype in which gradients are accumulated. Between `start` and `finish` ``sent``, in the format of
    the wire, is being reduced.
    """

    members: dict[int, tuple[int, int]]
    flat: torch.Tensor
    waiting: set[int] = field(default_factory=set)
    sent: torch.Tensor | None = None
    work: dist.Work | None = None

    @staticmethod
    def of(indices: Sequence[int], sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Bucket:
        members, at = {}, 0
        for index in indices:
            members[index] = at, sizes[index]
            at += sizes[index]
        return Bucket(members, torch.zeros(at, dtype=dtype, device=device))

    def view(self, index: int, shape: torch.Size) -> torch.Tensor:
        """The place of a member."""
        at, size = self.members[index]
        return self.flat.narrow(0, at, size).view(shape)

    def start(self, group: ProcessGroup, dtype: torch.dtype, divide_by: int) -> None:
        """Begins the reduction of ``flat``; it must not be touched until `finish`."""
        # To the format of the wire first: there the quotient may be more exact than here.
        self.sent = self.flat.to(dtype) / divide_by if divide_by > 1 else self.flat.to(dtype, copy=True)
        if group.size() > 1:
            self.work = dist.all_reduce(self.sent, group=group, async_op=True)

    def finish(self) -> None:
        """Waits, and puts the result into ``flat``."""
        if self.work is not None:
            self.work.wait()
        if self.sent is not None:
            self.flat.copy_(self.sent)
        self.sent = self.work = None
