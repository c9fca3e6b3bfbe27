"""Whether all ranks of a pipeline want the same, found out before anything is sent.

What one rank alone can see would leave the others waiting. So the ranks tell each other first, and all raise the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sharded.wire import all_gather_single

#: In place of a number of micro-batches, where a rank was given none.
_NONE = -(2**40)

#: Shape and dtype of a tensor; None for a dimension of any length.
Declaration = tuple[tuple[int | None, ...], torch.dtype]


@dataclass(frozen=True)
class Declared:
    """What one stage takes from the stage before, and gives to the one after."""

    takes: tuple[Declaration, ...]
    gives: tuple[Declaration, ...]


def require_chunks(chunks: int, group: ProcessGroup) -> None:
    """Raises ValueError, on every rank, unless each has as many stages as the others, and at least one."""
    everyone = _gathered([chunks], group)
    counts = [row[0] for row in everyone]
    if len(set(counts)) > 1 or counts[0] < 1:
        raise ValueError(
            f"the ranks {dist.get_process_group_ranks(group)} of the pipeline have {counts} stages: expected as many "
            "on each, the virtual stages, and at least 1; deal the layers to stages first"
        )


def require_borders(declared: Sequence[Declared] | None, numbers: Sequence[int], group: ProcessGroup) -> None:
    """Raises ValueError, on every rank, where a stage does not take what the one before gives. declared: of this rank's
    stages, whose numbers these are; None where nothing is declared, on all ranks alike."""
    mine = None if declared is None else list(zip(numbers, declared, strict=True))
    everyone: list[Any] = [mine]
    if group.size() > 1:
        everyone = [None] * group.size()
        dist.all_gather_object(everyone, mine, group=group)
    of_stage: dict[int, Declared] = {number: one for theirs in everyone for number, one in theirs or ()}
    for number in sorted(of_stage):
        if number + 1 in of_stage and of_stage[number].gives != of_stage[number + 1].takes:
            gives, takes = _text(of_stage[number].gives), _text(of_stage[number + 1].takes)
            raise ValueError(
                f"stage {number} gives {gives}, and stage {number + 1} expects {takes}: "
                "the stages must agree in number, shape and dtype of the tensors between them"
            )


def agreed_step(
    inputs: Sequence[Sequence[torch.Tensor]] | None,
    targets: Sequence[Any] | None,
    micro_batches: int | None,
    first: bool,
    last: bool,
    group: ProcessGroup,
) -> int:
    """The number of micro-batches of a step, alike on all ranks. first, last: whether this rank needs inputs, targets.

    Raises ValueError on every rank where that cannot be.
    """
    counts = [len(found) for found in (inputs, targets) if found is not None]
    counts += [] if micro_batches is None else [micro_batches]
    missing = (first and inputs is None) or (last and targets is None)
    smallest = min((x.shape[0] for one in inputs or () for x in one if x.dim()), default=1)
    low, high = min(counts, default=_NONE), max(counts, default=_NONE)
    rows = _gathered([low, high, int(missing), smallest], group)
    ranks = dist.get_process_group_ranks(group)
    given = {low for low, *_ in rows} - {_NONE}
    if given and max(given) < 1:
        raise ValueError(f"{min(given)} micro-batches on every rank: expected at least 1")
    for rank, (_, _, lacks, _) in zip(ranks, rows, strict=True):
        if lacks:
            raise ValueError(
                f"rank {rank} was given no inputs or no targets: the first stage needs inputs and the last one targets"
            )
    lows, highs = [row[0] for row in rows], [row[1] for row in rows]
    if len({*lows, *highs}) > 1:
        raise ValueError(
            f"the ranks {ranks} were given {[_counts(*both) for both in zip(lows, highs, strict=True)]} micro-batches: "
            "expected the same number on all, of inputs and of targets; where a rank has neither, pass micro_batches="
        )
    for rank, row in zip(ranks, rows, strict=True):
        if row[3] < 1:
            raise ValueError(
                f"a micro-batch of rank {rank} has no sample: {lows[0]} micro-batches need a batch of at least "
                f"{lows[0]} samples; take fewer micro-batches or a larger batch"
            )
    return lows[0]


def _counts(low: int, high: int) -> list[int] | None:
    return None if low == _NONE else sorted({low, high})


def _gathered(row: Sequence[int], group: ProcessGroup) -> list[list[int]]:
    """The rows of all ranks."""
    if group.size() == 1:
        return [list(row)]
    mine = torch.tensor(row, dtype=torch.int64)
    rows = mine.new_empty(group.size() * len(row))
    all_gather_single(rows, mine, group=group)
    found: list[list[int]] = rows.view(group.size(), -1).tolist()
    return found


def _text(declared: Sequence[Declaration]) -> str:
    shown = [
        f"{str(dtype).removeprefix('torch.')} [{', '.join('any' if n is None else str(n) for n in shape)}]"
        for shape, dtype in declared
    ]
    return ", ".join(shown) or "nothing"
