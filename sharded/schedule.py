"""What the algorithms of a reduction are written in: steps of messages, and nothing of how these travel.

An algorithm is a generator that yields one `Exchange` after another and is resumed when its messages have arrived. So
the same code runs over process groups (point_to_point.py), with several tensors in flight, and over no wire at all in
one process, where every size can be tried.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from sharded.cut import cut

#: A rank of the group, and the memory, [length] and contiguous, that is sent to it or that it fills.
Message = tuple[int, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Exchange:
    """The messages of one step. They travel at once; the step ends when all have been sent and received.

    Peers are ranks of the group. A message without elements is not sent: both ends know its length.
    """

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()


Schedule = Generator[Exchange, None, None]


@dataclass(frozen=True, eq=False)
class Job:
    """One reduction of one rank.

    total: [length], in the dtype of the accumulation: enters with this rank's values, and is overwritten. result:
    [length], in the tensor's dtype, where the reduced values go; the same memory as ``total`` where the dtypes agree.
    rank, size: of the group. reduction: of reductions.py.
    """

    total: torch.Tensor
    result: torch.Tensor
    rank: int
    size: int
    reduction: str


Algorithm = Callable[[Job], Schedule]


def pieces(x: torch.Tensor, size: int) -> list[torch.Tensor]:
    """x, [length], as ``size`` pieces that share its memory, the first length % size of them one longer."""
    return list(x.split_with_sizes(cut(x.numel(), size)))
