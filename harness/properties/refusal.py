"""Bad input that a candidate must refuse: on every rank alike, before anything is sent, and not by a hang."""

from __future__ import annotations

from collections.abc import Iterator

from harness.observation import CHANGED, REFUSED, Observation
from harness.properties.base import World
from harness.verdict import Finding, Verdict
from reference.mesh import Mesh


def judge_refusal(mesh: Mesh, observed: World, what: str) -> Verdict:
    """what: the bad input, as in "ids with a token -1"."""
    accepted = [rank for rank, seen in enumerate(observed) if _refused(seen) is None]
    if not accepted:
        return Verdict()
    rank, place = accepted[0], mesh.describe(accepted[0])
    if len(accepted) == len(observed):
        message = f"{what} were accepted: expected an error that says so, on every rank, before anything is sent"
        return Verdict((Finding("mismatch", message, rank, place),))
    other = next(r for r in range(len(observed)) if r not in accepted)
    message = f"{what} were accepted on {place} and refused on {mesh.describe(other)}: in training that is a hang"
    return Verdict((Finding("disagree", message, rank, place, details=f"there: {_refused(observed[other])}"),))


def half_loaded(mesh: Mesh, observed: World) -> Iterator[Finding]:
    """One finding where a load that was refused has changed something."""
    for rank, one in enumerate(observed):
        changed = one.facts.get(CHANGED)
        if changed:
            place = mesh.describe(rank)
            message = f"a load that was refused changed {', '.join(changed)} on {place}: expected all or nothing"
            yield Finding("mismatch", message, rank, place)
            return


def _refused(seen: Observation) -> str | None:
    said: str | None = seen.facts.get(REFUSED)
    return said
