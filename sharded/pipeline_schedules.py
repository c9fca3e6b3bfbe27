"""The schedules of a pipeline, as data: GPipe, 1F1B and interleaved 1F1B.

They differ in two things only: in which order a rank goes through its chunks and micro-batches, and how many forwards
it is ahead of its backwards. From then on it takes one backward, one forward, until the forwards are done.
GPipe: arXiv 1811.06965; 1F1B and its interleaved form: arXiv 2104.04473, section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, islice
from typing import Literal, get_args

from sharded.pipeline_actions import Action, Actions, Kind
from sharded.pipeline_messages import Step, with_messages

__all__ = [
    "Action",
    "Actions",
    "Kind",
    "ScheduleKind",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "schedule",
]

ScheduleKind = Literal["gpipe", "1f1b", "interleaved"]

#: (chunk, micro-batch).
Place = tuple[int, int]


def gpipe(stages: int, micro_batches: int, chunks: int = 1) -> tuple[Actions, ...]:
    """GPipe: every forward, then every backward, both in the order of the micro-batches; one list a rank.

    With several chunks a rank takes all micro-batches through one chunk before the next (looped, breadth first).
    Raises ValueError for a count below 1.
    """
    _require_counts(stages, chunks, micro_batches)
    everything = chunks * micro_batches
    return _schedule([everything] * stages, stages, chunks, [micro_batches])


def one_f_one_b(stages: int, micro_batches: int) -> tuple[Actions, ...]:
    """1F1B: as GPipe, but with no more activations in flight than there are stages from here on; one list a rank.

    Raises ValueError for a count below 1.
    """
    _require_counts(stages, 1, micro_batches)
    orders = []
    for rank in range(stages):
        forwards = ((0, k) for k in range(micro_batches))
        backwards = ((0, k) for k in count())
        orders.append(_alternating(forwards, backwards, forwards_ahead(stages, rank, micro_batches)))
    return with_messages(orders, 1)


def interleaved(stages: int, chunks: int, micro_batches: int) -> tuple[Actions, ...]:
    """Interleaved 1F1B; one list a rank.

    A rank takes a group of micro-batches through all of its chunks before the next group. Groups hold at least
    ``stages`` micro-batches, else a rank would wait for the first of a group to come round: ``stages`` where that
    divides the micro-batches, as in the paper, else some hold more. Fewer micro-batches than stages are one group.
    Raises ValueError for a count below 1.
    """
    _require_counts(stages, chunks, micro_batches)
    groups = groups_of(stages, micro_batches)
    ahead = [interleaved_ahead(stages, rank, chunks, micro_batches, groups[0]) for rank in range(stages)]
    return _schedule(ahead, stages, chunks, groups)


def schedule(kind: ScheduleKind, stages: int, chunks: int, micro_batches: int) -> tuple[Actions, ...]:
    """The schedule of a kind for ``stages`` ranks with ``chunks`` virtual stages each; one list of actions a rank.

    Raises ValueError for an unknown kind, a count below 1 and 1F1B with more than one chunk.
    """
    if kind == "gpipe":
        return gpipe(stages, micro_batches, chunks)
    if kind == "interleaved":
        return interleaved(stages, chunks, micro_batches)
    if kind != "1f1b":
        raise ValueError(f"unknown schedule {kind!r}: expected one of {', '.join(get_args(ScheduleKind))}")
    _require_counts(stages, chunks, micro_batches)
    if chunks > 1:
        raise ValueError(f"1f1b has one chunk a rank, not {chunks}: take interleaved, or gpipe, for several")
    return one_f_one_b(stages, micro_batches)


def forwards_ahead(stages: int, rank: int, micro_batches: int) -> int:
    """How many forwards 1F1B takes before its first backward: until the first micro-batch can be back."""
    return min(micro_batches, stages - rank)


def interleaved_ahead(stages: int, rank: int, chunks: int, micro_batches: int, group: int) -> int:
    """How many forwards interleaved 1F1B takes before its first backward.

    The last rank needs ``(chunks - 1) * group`` forwards before it reaches its last chunk, and that chunk's first
    forward. A rank that lies k before it starts k steps earlier, and the first gradient reaches it k steps later.
    """
    return min(chunks * micro_batches, (chunks - 1) * group + 2 * (stages - 1 - rank) + 1)


def groups_of(stages: int, micro_batches: int) -> list[int]:
    """The sizes of the groups of interleaved 1F1B, the larger ones first."""
    number = max(1, micro_batches // stages)
    size, left = divmod(micro_batches, number)
    return [size + (k < left) for k in range(number)]


def _schedule(ahead: list[int], stages: int, chunks: int, groups: list[int]) -> tuple[Actions, ...]:
    orders = []
    for rank in range(stages):
        forwards, backwards = _places(range(chunks), groups), _places(range(chunks)[::-1], groups)
        orders.append(_alternating(forwards, backwards, ahead[rank]))
    return with_messages(orders, chunks)


def _places(chunks: range, groups: list[int]) -> list[Place]:
    """Group by group, through all chunks in the given order."""
    starts = [sum(groups[:k]) for k in range(len(groups))]
    return [
        (chunk, start + k) for start, size in zip(starts, groups, strict=True) for chunk in chunks for k in range(size)
    ]


def _alternating(forwards: Iterable[Place], backwards: Iterable[Place], ahead: int) -> list[Step]:
    """``ahead`` forwards, then one backward and one forward in turn, then the backwards that are left."""
    forwards, backwards = iter(forwards), iter(backwards)
    order: list[Step] = [("forward", *place) for place in islice(forwards, ahead)]
    for place in forwards:
        order += [("backward", *next(backwards)), ("forward", *place)]
    order += [("backward", *place) for place in islice(backwards, ahead)]
    return order


def _require_counts(stages: int, chunks: int, micro_batches: int) -> None:
    for name, count_ in (("stages", stages), ("chunks", chunks), ("micro_batches", micro_batches)):
        if isinstance(count_, bool) or not isinstance(count_, int) or count_ < 1:
            raise ValueError(f"{name} is {count_!r}: expected a whole number of at least 1")
