"""Runs a schedule in units of time, without computing anything: who waits for whom, and for how long.

Every rank takes its actions in order. Sends do not wait, messages take no time, and a message that is received waits
until it has been sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from reference.schedule import BI, BW, RB, RF, SB, SF, Array, B, F
from reference.schedule_messages import channels
from reference.schedule_tables import Tables


@dataclass(frozen=True)
class Units:
    """How long each part of a micro-batch takes on a stage; a whole backward is both of its parts."""

    forward: int = 1
    backward_input: int = 1
    backward_weight: int = 1

    @property
    def backward(self) -> int:
        return self.backward_input + self.backward_weight

    def __str__(self) -> str:
        return f"forward {self.forward}, backward {self.backward}"


#: Of the ranks that wait, so many are named.
_SHOWN = 3

#: A backward takes twice as long as a forward: it computes the gradients of the input and of the weights.
UNITS = Units()


@dataclass(frozen=True, eq=False)
class Run:
    """When each action starts and ends, in units of time: for each rank [actions]."""

    start: tuple[Array, ...]
    end: tuple[Array, ...]

    @property
    def span(self) -> int:
        """From the first action to the last end."""
        return max(int(end[-1]) for end in self.end)

    @property
    def busy(self) -> tuple[int, ...]:
        """Of each rank."""
        return tuple(int((end - start).sum()) for start, end in zip(self.start, self.end, strict=True))

    @property
    def idle_share(self) -> Fraction:
        """Of all ranks together."""
        return 1 - Fraction(sum(self.busy), self.span * len(self.busy))


@dataclass(frozen=True)
class Stuck:
    """No rank can go on. The message names all that wait; rank and position are the first's."""

    message: str
    rank: int
    position: int


def run(t: Tables, units: Units = UNITS) -> Run | Stuck:
    """Takes every rank through its list, with sends that do not wait."""
    needs, gives = _events(t)
    duration = np.zeros(8, dtype=np.int64)
    duration[[F, B, BI, BW]] = units.forward, units.backward, units.backward_input, units.backward_weight
    took = duration[t.kind]
    ends = np.cumsum([len(actions) for actions in t.lists.actions]).tolist()
    need, give, lasts = needs.tolist(), gives.tolist(), took.tolist()
    at = [0, *ends[:-1]]
    now = [0] * len(ends)
    when = [-1] * _size(t)  # of each event, its time
    waiting: dict[int, int] = {}  # the event that a rank waits for: each has at most one that needs it
    finished = [0] * len(need)
    ready = list(range(len(ends)))[::-1]
    while ready:
        rank = ready.pop()
        i, time, last = at[rank], now[rank], ends[rank]
        while i < last:
            event = need[i]
            if event >= 0:
                came = when[event]
                if came < 0:
                    waiting[event] = rank
                    break
                time = max(time, came)
            time += lasts[i]
            finished[i] = time
            event = give[i]
            if event >= 0:
                when[event] = time
                if event in waiting:
                    ready.append(waiting.pop(event))
            i += 1
        at[rank], now[rank] = i, time
    if at != ends:
        return _stuck(t, [(rank, at[rank]) for rank in range(len(ends)) if at[rank] < ends[rank]])
    end = np.array(finished, dtype=np.int64)
    parts = ends[:-1]
    return Run(tuple(np.split(end - took, parts)), tuple(np.split(end, parts)))


def _size(t: Tables) -> int:
    return 4 * t.lists.stages * t.lists.micro_batches


def _events(t: Tables) -> tuple[Array, Array]:
    """What each action needs, and what it gives, as numbers of events; -1 for nothing.

    Events are: a forward on a stage, a backward, an activation sent to a stage, a gradient sent to it.
    """
    m = t.lists.micro_batches
    each = t.lists.stages * m
    elsewhere = t.lists.next_is_elsewhere()
    needs, gives = np.full(t.kind.shape, -1), np.full(t.kind.shape, -1)
    for direction, (kinds, send, receive, step) in enumerate((((F,), SF, RF, 1), ((B, BI), SB, RB, -1))):
        computed, sent = direction * each, (2 + direction) * each
        computes = np.isin(t.kind, kinds)
        here = t.stage * m + t.micro_batch
        gives[computes] = computed + here[computes]
        is_send, is_receive = t.kind == send, t.kind == receive
        gives[is_send] = sent + (here + step * m)[is_send]
        source = t.stage - step
        inner = computes & (source >= 0) & (source < t.lists.stages)
        needs[inner] = computed + (here - step * m)[inner]
        border = inner & (elsewhere[t.stage - 1] if step == 1 else elsewhere[t.stage])
        if t.lists.receives == "wait":
            needs[is_receive] = sent + here[is_receive]
            needs[border] = -1  # its receive comes before it, and has waited
        elif t.lists.receives == "posted":
            needs[border] = sent + here[border]
    return needs, gives


def _stuck(t: Tables, waiting: list[tuple[int, int]]) -> Stuck:
    says = []
    for rank, action in waiting[:_SHOWN]:
        what = t.name(int(t.kind[action]), int(t.stage[action]), int(t.micro_batch[action]))
        says.append(f"rank {rank} waits at position {int(t.position[action])}, {what}")
    left = len(waiting) - _SHOWN
    others = f"; and {left} more rank{'s' if left > 1 else ''}" if left > 0 else ""
    rank, action = waiting[0]
    return Stuck(f"no rank can go on: {'; '.join(says)}{others}", rank, int(t.position[action]))


def rendezvous(t: Tables) -> Stuck | None:
    """Whether the lists also come to their end where a send waits for its receive: None where they do.

    Sends and receives that stand together are posted together, and the rank waits until all of them have met the
    other end. Lists without messages, and those whose receives are only posted, have nothing to wait so.
    """
    if t.lists.receives != "wait":
        return None
    computes = np.isin(t.kind, (F, B, BI, BW))
    starts = np.cumsum([0] + [len(actions) for actions in t.lists.actions[:-1]])
    before: Array = np.cumsum(computes) - computes
    group: Array = before - before[starts][t.rank]  # communication between two computations of a rank is one group
    sends, receives = (side[np.argsort(side[:, 2], kind="stable")] for side in channels(t))
    own = np.concatenate([sends[:, 3], receives[:, 3]])
    peer = np.concatenate([receives[:, 3], sends[:, 3]])
    order = np.lexsort((t.position[own], t.rank[own]))
    own, peer = own[order], peer[order]
    bounds = np.searchsorted(t.rank[own], np.arange(t.lists.ranks + 1)).tolist()
    own_group, peer_group, peer_rank = group[own].tolist(), group[peer].tolist(), t.rank[peer].tolist()
    posted = [0] * t.lists.ranks  # the group that a rank has posted, and with it all before
    at = bounds[:-1]
    waiting: dict[int, list[tuple[int, int]]] = {}  # for each rank, those that wait for a group of it
    ready = list(range(t.lists.ranks))[::-1]
    while ready:
        rank = ready.pop()
        i, last = at[rank], bounds[rank + 1]
        while i < last:
            posted[rank] = own_group[i]
            other = peer_rank[i]
            if posted[other] < peer_group[i] and at[other] < bounds[other + 1]:
                waiting.setdefault(other, []).append((peer_group[i], rank))
                break
            i += 1
        at[rank] = i
        reached = posted[rank] if i < last else len(computes)
        still = []
        for wanted, other in waiting.pop(rank, []):
            if wanted <= reached:
                ready.append(other)
            else:
                still.append((wanted, other))
        if still:
            waiting[rank] = still
    left = [(rank, int(own[at[rank]])) for rank in range(t.lists.ranks) if at[rank] < bounds[rank + 1]]
    return _stuck(t, left) if left else None
