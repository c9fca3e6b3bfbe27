"""How ranks that did not return become findings."""

from __future__ import annotations

import re
from pathlib import Path

from harness.verdict import Finding, Kind
from harness.world import Blocked, Died, Outcome, Raised
from reference.mesh import Mesh

# What the exceptions of harness.session, harness.candidate and harness.local mean when they arrive from a rank.
_KINDS: dict[str, Kind] = {
    "CandidateRaised": "error",
    "NotOffered": "error",
    "WrongAdapter": "error",
    "WrongResult": "mismatch",
}

_HARNESS = re.escape(str(Path(__file__).parent))
_OUR_FRAME = re.compile(rf'  File "{_HARNESS}/(?!candidates/)').match


def rejection_of(outcome: Outcome) -> str | None:
    """The candidate's reason where every rank answered that it does not offer the case."""
    answers = [e for e in outcome.ranks if isinstance(e, Raised) and _name(e) == "NotOffered"]
    return answers[0].message if len(answers) == len(outcome.ranks) else None


def message_of(outcome: Outcome, kind: type[Exception]) -> str | None:
    """What a rank said that raised an exception of this class, or None."""
    return next((e.message for e in outcome.ranks if isinstance(e, Raised) and _name(e) == kind.__name__), None)


def findings_of(outcome: Outcome, mesh: Mesh | None) -> list[Finding]:
    """One finding for the gravest thing that happened; what the other ranks did is in its details."""
    died = [(r, e) for r, e in enumerate(outcome.ranks) if isinstance(e, Died)]
    raised = [(r, e) for r, e in enumerate(outcome.ranks) if isinstance(e, Raised)]
    blocked = [(r, e) for r, e in enumerate(outcome.ranks) if isinstance(e, Blocked)]
    size = len(outcome.ranks)
    if died:
        rank, ending = died[0]
        message = f"{name_ranks([r for r, _ in died], size)} died: {ending.description}"
        last = [f"rank {r} died, last collective: {e.last_collective or 'none'}" for r, e in died]
        saw = [f"rank {r} raised {e.type_name}: {e.message.partition(chr(10))[0]}" for r, e in raised]
        words = "what a process said as it died, such as gloo's reason, is on stderr"
        details = "\n".join(filter(None, [*last, *saw, words, _blocked_details(blocked)]))
        return [_finding("crash", message, rank, mesh, details)]
    if raised:
        # A rank that raises because a partner left is a consequence: the first message of the commonest kind counts.
        rank, error = min(raised, key=lambda pair: (_name(pair[1]) not in _KINDS, pair[0]))
        first, _, rest = error.message.partition("\n")
        alike = [r for r, e in raised if e.message.partition("\n")[0] == first]
        kind = _KINDS.get(_name(error), "harness")
        traced = [error.traceback if kind == "harness" else rest, *map(_waiting, blocked)]
        return [
            _finding(kind, _said(error, first, name_ranks(alike, size)), rank, mesh, "\n".join(filter(None, traced)))
        ]
    rank = blocked[0][0]
    returned = [r for r in range(size) if r not in dict(blocked)]
    who = f"{name_ranks([r for r, _ in blocked], size)} did not finish" if returned else "no rank finished"
    others = f"; {name_ranks(returned, size)} did" if returned else ""
    message = f"{who}: given up after {outcome.seconds:.1f} s{others}"
    return [_finding("hang", message, rank, mesh, _blocked_details(blocked))]


def _said(error: Raised, first: str, who: str) -> str:
    """The first line of an exception's message as a sentence."""
    match _name(error):
        case "CandidateRaised":
            phase, _, what = first.partition(": ")
            return f"the candidate raised {phase} on {who}: {what}"
        case "NotOffered":
            return f"the candidate refused the case on {who} only, and must refuse it on every rank or none: {first}"
        case "WrongAdapter":
            return f"the adapter does not fit on {who}: {first}"
        case "WrongResult":
            return f"wrong result on {who}: {first}"
        case _:
            return f"our own code raised {error.type_name} on {who}: {first}"


def _waiting(blocked: tuple[int, Blocked]) -> str:
    rank, ending = blocked
    return f"rank {rank} waited meanwhile, last collective: {ending.last_collective or 'none'}"


def _blocked_details(blocked: list[tuple[int, Blocked]]) -> str:
    return "\n".join(
        f"rank {rank}, last collective: {ending.last_collective or 'none'}\n{_without_ours(ending.stack)}"
        for rank, ending in blocked
    )


def _without_ours(stack: str) -> str:
    """The stack down to what of the candidate or a library was called first; our own frames are the same for all."""
    lines = stack.rstrip().splitlines()
    theirs = [number for number, line in enumerate(lines) if line.startswith("  File ") and not _OUR_FRAME(line)]
    return "\n".join(lines[: theirs[-1] + 1] if theirs else lines)


def _finding(kind: Kind, message: str, rank: int, mesh: Mesh | None, details: str) -> Finding:
    place = mesh.describe(rank) if mesh is not None and rank < mesh.size else None
    return Finding(kind, message, rank, place, details=details)


def _name(raised: Raised) -> str:
    return raised.type_name.rpartition(".")[2]


def name_ranks(ranks: list[int], size: int) -> str:
    """Those of so many: ``rank 1``, ``ranks 0, 2`` or ``every rank``."""
    if len(ranks) == size and size > 1:
        return "every rank"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))
