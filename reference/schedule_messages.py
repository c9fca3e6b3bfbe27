"""The rules of a schedule's messages: each is sent and received once, at the right time and in the right order.

Every border between two stages on different ranks has two messages a micro-batch: the activation, from the stage
before to the stage after, and the gradient, back. Ranks send without tags, so that the k-th message from rank a to rank
b is what b receives k-th from a, whatever it takes it for.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from reference.schedule import BI, RB, RF, SB, SF, Array, B, F
from reference.schedule_tables import Broken, Tables, more

#: For each direction: send, receive, what computes a message, what needs it, and how far the stage it goes to is.
_DIRECTIONS = ((SF, RF, (F,), (F,), 1), (SB, RB, (B, BI), (B, BI), -1))
_WHAT = {SF: "activation", RF: "activation", SB: "gradient", RB: "gradient"}


def broken_messages(t: Tables) -> Iterator[Broken]:
    """The rules that messages break; nothing where the lists say only what is computed."""
    if t.lists.receives == "none":
        return
    found = [*_once(t)]
    found = found or [*_in_time(t)]
    yield from found or [*_matching(t)]


def _once(t: Tables) -> Iterator[Broken]:
    border = t.lists.next_is_elsewhere()
    before = np.append(False, border[:-1])
    for kind, needed in ((SF, border), (RF, before), (SB, before), (RB, border)):
        rule = "messages once"
        count = t.count[kind]
        missing = t.worst_first((count == 0) & needed[:, None])
        for stage, k in missing[:1]:
            rank = int(t.lists.rank_of[stage])
            yield Broken(rule, f"rank {rank}: {t.name(kind, stage, k)} is missing{more(len(missing))}", rank)
        again = t.worst_first(count > 1, t.first[kind])
        for stage, k in again[:1]:
            rank, at = int(t.lists.rank_of[stage]), t.again(kind, stage, k)
            message = f"rank {rank}, position {at}: {t.name(kind, stage, k)} comes again"
            yield Broken(rule, f"{message} (first at {int(t.first[kind, stage, k])}){more(len(again))}", rank, at)
        needless = t.worst_first((count == 1) & ~needed[:, None], t.first[kind])
        for stage, k in needless[:1]:
            rank, at = int(t.lists.rank_of[stage]), int(t.first[kind, stage, k])
            side = "after" if kind in (SF, RB) else "before"
            end = stage in (0, t.lists.stages - 1) and not 0 <= stage + (1 if side == "after" else -1) < t.lists.stages
            why = f"there is no stage {side} it" if end else f"the stage {side} it is on the same rank"
            message = f"rank {rank}, position {at}: {t.name(kind, stage, k)} has no other end: {why}"
            yield Broken(rule, message + more(len(needless)), rank, at)


def _in_time(t: Tables) -> Iterator[Broken]:
    """A receive comes before what needs its message, a send after what computes it."""
    for send, receive, makers, users, _ in _DIRECTIONS:
        makes, uses = (np.max([t.first[kind] for kind in kinds], axis=0) for kinds in (makers, users))
        late = t.worst_first((t.count[receive] > 0) & (t.first[receive] > uses), uses)
        for stage, k in late[:1]:
            rank, at = int(t.lists.rank_of[stage]), int(uses[stage, k])
            kind = next(kind for kind in users if t.count[kind, stage, k])
            message = (
                f"rank {rank}, position {at}: {t.name(kind, stage, k)} comes before its {_WHAT[receive]} is received "
                f"(position {int(t.first[receive, stage, k])}){more(len(late))}"
            )
            yield Broken("received first", message, rank, at)
        early = t.worst_first((t.count[send] > 0) & (t.first[send] < makes), t.first[send])
        for stage, k in early[:1]:
            rank, at = int(t.lists.rank_of[stage]), int(t.first[send, stage, k])
            message = (
                f"rank {rank}, position {at}: {t.name(send, stage, k)} comes before it is computed "
                f"(position {int(makes[stage, k])}){more(len(early))}"
            )
            yield Broken("computed first", message, rank, at)


def _matching(t: Tables) -> Iterator[Broken]:
    sent, received = channels(t)
    # Ordered by the pair of ranks, then by the position of the send, or of the receive.
    sends = sent[np.lexsort((t.position[sent[:, 3]], sent[:, 1], sent[:, 0]))]
    receives = received[np.lexsort((t.position[received[:, 3]], received[:, 1], received[:, 0]))]
    wrong = np.flatnonzero((sends[:, :3] != receives[:, :3]).any(axis=1))
    if not wrong.size:
        return
    at = int(wrong[0])
    source, target = int(sends[at, 0]), int(sends[at, 1])
    number = int((sends[:at, :2] == sends[at, :2]).all(axis=1).sum())
    i, j = int(sends[at, 3]), int(receives[at, 3])
    message = (
        f"rank {target}, position {int(t.position[j])}: {_of(t, j)} meets {_of(t, i)} (rank {source}, position "
        f"{int(t.position[i])}): both are number {number + 1} of the messages from rank {source} to rank {target}"
        f"{more(len(wrong))}"
    )
    yield Broken("matching order", message, target, int(t.position[j]))


def _of(t: Tables, action: int) -> str:
    return t.name(int(t.kind[action]), int(t.stage[action]), int(t.micro_batch[action]))


def channels(t: Tables) -> tuple[Array, Array]:
    """Sends and receives, each [messages, 4]: from rank, to rank, which message, and the action's place in the tables.

    A message has the same number on both sides.
    """
    stages, micro_batches = t.lists.stages, t.lists.micro_batches
    sides: list[list[Array]] = [[], []]
    for direction, (send, receive, _, _, step) in enumerate(_DIRECTIONS):
        for side, kind in enumerate((send, receive)):
            at = np.flatnonzero(t.kind == kind)
            source, target = (t.stage[at], t.stage[at] + step) if kind == send else (t.stage[at] - step, t.stage[at])
            name = (direction * stages + target) * micro_batches + t.micro_batch[at]
            ranks = t.lists.rank_of
            sides[side].append(np.stack([ranks[source], ranks[target], name, at], axis=1))
    sends, receives = (np.concatenate(rows) for rows in sides)
    return sends, receives
