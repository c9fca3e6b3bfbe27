"""How ranks that did not return become findings."""

from __future__ import annotations

from harness.verdict import Finding, Kind
from harness.world import Blocked, Died, Outcome, Raised
from reference.mesh import Mesh

# How the exceptions of harness.session and harness.local arrive from a rank.
_KINDS: dict[str, Kind] = {"CandidateRaised": "error", "WrongResult": "mismatch", "NotOffered": "error"}


def rejection_of(outcome: Outcome) -> str | None:
    """The candidate's reason where every rank answered that it does not offer the case."""
    answers = [e for e in outcome.ranks if isinstance(e, Raised) and _name(e) == "NotOffered"]
    return answers[0].message if len(answers) == len(outcome.ranks) else None


def findings_of(outcome: Outcome, mesh: Mesh | None) -> list[Finding]:
    """One finding for the gravest thing that happened; what the other ranks did is in its details."""
    died = [(r, e) for r, e in enumerate(outcome.ranks) if isinstance(e, Died)]
    raised = [(r, e) for r, e in enumerate(outcome.ranks) if isinstance(e, Raised)]
    blocked = [(r, e) for r, e in enumerate(outcome.ranks) if isinstance(e, Blocked)]
    size = len(outcome.ranks)
    if died:
        rank, ending = died[0]
        message = f"{_ranks([r for r, _ in died], size)} died: {ending.description}"
        return [_finding("crash", message, rank, mesh, _blocked_details(blocked))]
    if raised:
        # A rank that raises because a partner left is a consequence: the first message of the commonest kind counts.
        rank, error = min(raised, key=lambda pair: (_name(pair[1]) not in _KINDS, pair[0]))
        who = _ranks([r for r, e in raised if e.message.partition("\n")[0] == error.message.partition("\n")[0]], size)
        kind = _KINDS.get(_name(error), "harness")
        first, _, rest = error.message.partition("\n")
        what = {"error": "the candidate raised", "mismatch": "wrong result"}.get(
            kind, f"our own code raised {error.type_name}"
        )
        details = rest if _name(error) == "CandidateRaised" else (error.traceback if kind == "harness" else "")
        waiting = f"\n{_ranks([r for r, _ in blocked], size)} waited meanwhile" if blocked else ""
        return [_finding(kind, f"{what} on {who}: {first}", rank, mesh, (details + waiting).strip())]
    rank = blocked[0][0]
    message = f"{_ranks([r for r, _ in blocked], size)} never finished: {outcome.seconds:.1f} s without an end"
    return [_finding("hang", message, rank, mesh, _blocked_details(blocked))]


def _blocked_details(blocked: list[tuple[int, Blocked]]) -> str:
    return "\n".join(
        f"rank {rank}, last collective: {ending.last_collective or 'none'}\n{ending.stack.rstrip()}"
        for rank, ending in blocked
    )


def _finding(kind: Kind, message: str, rank: int, mesh: Mesh | None, details: str) -> Finding:
    place = mesh.describe(rank) if mesh is not None and rank < mesh.size else None
    return Finding(kind, message, rank, place, details=details)


def _name(raised: Raised) -> str:
    return raised.type_name.rpartition(".")[2]


def _ranks(ranks: list[int], size: int) -> str:
    if len(ranks) == size and size > 1:
        return "every rank"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))
