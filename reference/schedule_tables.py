"""Where in its rank's list every action of a schedule stands, and how a broken rule is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference.schedule import ACTION_KINDS, BI, BW, RB, RF, SB, SF, Array, B, F, Lists

_NAMES = {
    F: "the forward",
    B: "the backward",
    BI: "the backward to the input",
    BW: "the backward to the weights",
    RF: "the receive of the activation",
    SF: "the send of the activation",
    RB: "the receive of the gradient",
    SB: "the send of the gradient",
}


@dataclass(frozen=True)
class Broken:
    """A rule that lists of actions break. rank and position (from 0, in its list): where it shows first, None where
    something is missing."""

    rule: str
    message: str
    rank: int | None = None
    position: int | None = None


@dataclass(frozen=True, eq=False)
class Tables:
    """All actions in one row, ranks one after the other, and what is found of them.

    lists: their actions are of known kinds, micro-batches and chunks. rank, position, kind, stage, micro_batch:
    [actions]. count: [kinds, stages, micro-batches]. first: likewise, the position of the first such action in its
    rank's list, -1 where there is none.
    """

    lists: Lists
    rank: Array
    position: Array
    kind: Array
    stage: Array
    micro_batch: Array
    count: Array
    first: Array

    @staticmethod
    def of(lists: Lists) -> Tables:
        lengths = [len(actions) for actions in lists.actions]
        kind, chunk, micro_batch = np.concatenate(lists.actions).T
        rank = np.repeat(np.arange(lists.ranks), lengths)
        position = np.concatenate([np.arange(length) for length in lengths])
        stage = np.array(lists.placement)[rank, chunk]
        shape = len(ACTION_KINDS), lists.stages, lists.micro_batches
        code = np.ravel_multi_index((kind, stage, micro_batch), shape)
        size = int(np.prod(shape))
        first = np.full(size, -1)
        first[code[::-1]] = position[::-1]
        count = np.bincount(code, minlength=size)
        return Tables(lists, rank, position, kind, stage, micro_batch, count.reshape(shape), first.reshape(shape))

    def again(self, kind: int, stage: int, micro_batch: int) -> int:
        """The position of the second such action."""
        same = (self.kind == kind) & (self.stage == stage) & (self.micro_batch == micro_batch)
        return int(self.position[same][1])

    def name(self, kind: int, stage: int, micro_batch: int) -> str:
        """For a sentence: ``the forward of micro-batch 3 on stage 5 (chunk 1)``."""
        rank = int(self.lists.rank_of[stage])
        chunk = f" (chunk {self.lists.placement[rank].index(stage)})" if self.lists.chunks > 1 else ""
        return f"{_NAMES[kind]} of micro-batch {micro_batch} on stage {stage}{chunk}"

    def worst_first(self, wrong: NDArray[np.bool_], positions: Array | None = None) -> list[tuple[int, int]]:
        """The (stage, micro-batch) of what is wrong, [stages, micro-batches], by rank, then by position or stage."""
        found = np.argwhere(wrong)
        rank = self.lists.rank_of[found[:, 0]]
        then = found[:, 0] if positions is None else positions[wrong]
        return [(int(s), int(k)) for s, k in found[np.lexsort((then, rank))]]


def unknown_actions(lists: Lists) -> Iterator[Broken]:
    """Actions of micro-batches and chunks that there are not: with them nothing else can be said."""
    for rank, actions in enumerate(lists.actions):
        for column, name, size in ((2, "micro-batch", lists.micro_batches), (1, "chunk", lists.chunks)):
            outside = np.flatnonzero((actions[:, column] < 0) | (actions[:, column] >= size))
            if outside.size:
                at = int(outside[0])
                kind, number = ACTION_KINDS[actions[at, 0]], int(actions[at, column])
                there = f"{size} {name}{'' if size == 1 else 'es' if name == 'micro-batch' else 's'}"
                yield Broken(
                    "known actions",
                    f"rank {rank}, position {at}: {kind} of {name} {number}, but there "
                    f"{'is' if size == 1 else 'are'} {there}{more(len(outside))}",
                    rank,
                    at,
                )
                break


def more(count: int) -> str:
    """How many others are likewise."""
    return f" (and {count - 1} more)" if count > 1 else ""
