"""Messages between two ranks: each that is sent is received, and each rank moves just the bytes that are due.

A send and a receive are no collective: two ranks that exchange messages do different things. So they are judged apart
from `traffic`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from harness.observation import Observation
from harness.properties.base import World
from harness.verdict import Finding
from harness.world.traffic import Collective
from reference.mesh import Mesh
from reference.traffic import Load

_DIRECTIONS = ("send", "recv")


def without_messages(observed: World) -> list[Observation]:
    """The same with the collectives alone."""
    return [
        seen
        if seen.sent is None
        else replace(seen, sent=tuple(one for one in seen.sent if one.collective.operation not in _DIRECTIONS))
        for seen in observed
    ]


def judge_messages(mesh: Mesh, axis: str, due: Sequence[Sequence[Load]], observed: World) -> Iterator[Finding]:
    """One finding for each kind of difference, at its first rank. due: bytes, by the coordinate along ``axis``; where
    there are several of them, each is right.

    Nothing is said where traffic was not recorded."""
    if any(seen.sent is None for seen in observed):
        return
    messages = [
        [one.collective for one in seen.sent or () if one.collective.operation in _DIRECTIONS] for seen in observed
    ]
    for check in (_strangers, _unpaired):
        finding = next(check(mesh, axis, messages), None)
        if finding is not None:
            yield finding
    wrong = [next(_bytes(mesh, axis, one, messages), None) for one in due]
    if all(wrong):
        yield from wrong[:1]  # type: ignore[misc]


Messages = Sequence[Sequence[Collective]]


def _strangers(mesh: Mesh, axis: str, messages: Messages) -> Iterator[Finding]:
    for rank, mine in enumerate(messages):
        group = mesh.group_of(rank, axis)
        for one in mine:
            if one.peer not in group:
                what = f"{one.describe()}, where only ranks {list(group)} take part"
                yield _finding(mesh, rank, f"a message to or from a rank that has no part in it: {what}")


def _unpaired(mesh: Mesh, axis: str, messages: Messages) -> Iterator[Finding]:
    """What one rank sends to another, that one receives, of the same length and dtype, in the same order
    within a tag."""
    for sender in range(len(messages)):
        for receiver in mesh.group_of(sender, axis):
            sent, got = (
                # Those of a tag are matched by their order; of different tags any may come first.
                sorted(
                    ((one.tag, one.dtype, one.elements) for one in messages[rank] if _is(one, direction, peer)),
                    key=lambda one: one[0],
                )
                for rank, direction, peer in ((sender, "send", receiver), (receiver, "recv", sender))
            )
            if sent != got:
                message = f"rank {sender} sends {_texts(sent)} to rank {receiver}, which expects {_texts(got)}"
                yield _finding(mesh, sender, message)


def _bytes(mesh: Mesh, axis: str, due: Sequence[Load], messages: Messages) -> Iterator[Finding]:
    for rank, mine in enumerate(messages):
        sent, received = (sum(one.bytes for one in mine if one.operation == direction) for direction in _DIRECTIONS)
        load = due[mesh.coordinate(rank, axis)]
        if (sent, received) != (load.sent, load.received):
            message = (
                f"{mesh.describe(rank)} sends {sent} bytes point to point and receives {received}, "
                f"where {load.sent} and {load.received} are due"
            )
            yield _finding(mesh, rank, message)


def _is(one: Collective, direction: str, peer: int) -> bool:
    return one.operation == direction and one.peer == peer


def _texts(messages: Sequence[tuple[int, str | None, int]]) -> str:
    some = ", ".join(f"{elements} {dtype}" for _, dtype, elements in messages[:4])
    return (some or "nothing") + (f" and {len(messages) - 4} more" if len(messages) > 4 else "")


def _finding(mesh: Mesh, rank: int, message: str) -> Finding:
    return Finding("traffic", message, rank, mesh.describe(rank))
