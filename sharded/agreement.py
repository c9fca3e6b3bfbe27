"""Whether all ranks of a group ask for the same reduction, found out before any of it is sent.

A tensor of another length or dtype on one rank would hang the others, or mix bytes that do not belong together. So each
rank gives a row of `ROW` whole numbers to one small all-gather, and every rank reads in the rows the same thing: that
all agree, or who asks for what.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sharded.reductions import REDUCTIONS
from sharded.wire import all_gather_single

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
ALGORITHMS = ("ring", "halving_doubling", "tree", "parameter_server")
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
)  # fmt: skip

_SHOWN = 8  # tensors whose length and dtype a row shows; all are in its digest
_HEAD = 7
ROW = _HEAD + 2 * _SHOWN

#: What a rank alone can see is wrong, in the words of all ranks.
_PROBLEMS = {
    1: f"asks for an unknown reduction: expected one of {', '.join(REDUCTIONS)}",
    2: f"asks for an unknown algorithm: expected one of {', '.join(ALGORITHMS)}",
    3: "asks for the mean of a tensor that is not floating-point: convert it, or sum and divide",
    4: f"has a tensor of another dtype than can be reduced: expected one of {', '.join(map(str, DTYPES))}",
    5: "has a piece that is not its piece of the whole length: pass the balanced one, the first length % n one longer",
    6: "has something that is not a dense tensor: expected torch.strided",
}


@dataclass(frozen=True)
class Request:
    """What one rank asks for. shapes, dtypes: of each tensor in turn; ``short``: a piece is not of the length due."""

    operation: str
    algorithm: str
    reduction: str
    fp32: bool
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    dense: bool = True
    short: bool = False

    def problem(self) -> int:
        """The number of what is wrong with it, 0 for nothing."""
        if not self.dense:
            return 6
        if self.reduction not in REDUCTIONS:
            return 1
        if self.algorithm not in ALGORITHMS:
            return 2
        if any(dtype not in DTYPES for dtype in self.dtypes):
            return 4
        if self.reduction == "avg" and not all(dtype.is_floating_point for dtype in self.dtypes):
            return 3
        return 5 if self.short else 0

    def row(self) -> list[int]:
        """[ROW] whole numbers: equal on two ranks if and only if they ask for the same."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=8).digest()
        names = (
            (self.operation, OPERATIONS),
            (self.reduction, REDUCTIONS),
            (self.algorithm, ALGORITHMS),
        )
        codes = [known.index(name) if name in known else -1 for name, known in names]
        head = [self.problem(), *codes, int(self.fp32), len(self.shapes), int.from_bytes(digest, "little", signed=True)]
        shown = [
            number
            for shape, dtype in list(zip(self.shapes, self.dtypes, strict=True))[:_SHOWN]
            for number in (torch.Size(shape).numel(), DTYPES.index(dtype) if dtype in DTYPES else -1)
        ]
        return head + shown + [0] * (ROW - _HEAD - len(shown))


class Agreement:
    """An all-gather of the ranks' rows, on its way. Every rank of the group must begin it."""

    def __init__(self, request: Request, group: ProcessGroup, device: torch.device) -> None:
        row = torch.tensor(request.row(), dtype=torch.int64, device=device)
        self._ranks = dist.get_process_group_ranks(group)
        self._rows = row.new_empty(len(self._ranks) * ROW)
        self._work = all_gather_single(self._rows, row, group=group, async_op=True)

    def settle(self) -> None:
        """Waits for it. Raises ValueError, on every rank, where a rank asks for what it cannot have, or not for the
        same as the others."""
        self._work.wait()
        rows = [tuple(row) for row in self._rows.view(-1, ROW).tolist()]
        wrong = [f"rank {rank} {_PROBLEMS[row[0]]}" for rank, row in zip(self._ranks, rows, strict=True) if row[0]]
        if wrong:
            raise ValueError("; ".join(wrong))
        if len(set(rows)) > 1:
            raise ValueError(_differing(rows, self._ranks))


def require(request: Request) -> None:
    """Raises ValueError for what this rank alone can see is wrong."""
    problem = request.problem()
    if problem:
        raise ValueError(f"rank {dist.get_rank()} {_PROBLEMS[problem]}")


def _differing(rows: Sequence[tuple[int, ...]], ranks: Sequence[int]) -> str:
    """Who asks for what, those who agree together."""
    said = [
        f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {_text(row)}"
        for row in dict.fromkeys(rows)
        for who in [[rank for rank, other in zip(ranks, rows, strict=True) if other == row]]
    ]
    seen = {_text(row) for row in rows}
    hint = " (of other shapes, or differing in a later tensor)" if len(seen) == 1 else ""
    return f"the ranks of the group do not ask for the same{hint}; {'; '.join(said)}: pass the same on all of them"


def _text(row: tuple[int, ...]) -> str:
    """For example ``all_reduce, sum, ring of 2 tensors: 5 float32, 3 float32``."""
    _, operation, reduction, algorithm, fp32, count, _ = row[:_HEAD]
    what = f"{OPERATIONS[operation]}, {REDUCTIONS[reduction]}, {ALGORITHMS[algorithm]}{', in fp32' if fp32 else ''}"
    shown = row[_HEAD : _HEAD + 2 * min(count, _SHOWN)]
    pairs = [
        f"{length} {str(DTYPES[dtype]).removeprefix('torch.')}"
        for length, dtype in zip(shown[::2], shown[1::2], strict=True)
    ]
    more = " ..." if count > _SHOWN else ""
    return f"{what} of {count} tensor{'' if count == 1 else 's'}: {', '.join(pairs) or 'none'}{more}"
