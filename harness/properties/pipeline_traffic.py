"""Traffic of a pipeline: what crosses the borders, once each way, and the copies of a tied weight; nothing more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from harness.properties.base import World
from harness.verdict import Finding
from harness.world.traffic import Collective
from reference.pipeline import PipelineCase
from reference.pipeline_traffic import due, tied_elements

_DIRECTIONS = ("send", "recv")


def judge_borders(case: PipelineCase, observed: World) -> Iterator[Finding]:
    """One finding for the first rank that sends or receives more or less than is due, for each direction; and one for a
    reduction along the axis that nothing asks for. Messages of whole numbers beyond the ids are the candidate's own."""
    if any(seen.sent is None for seen in observed):
        return
    for direction in _DIRECTIONS:
        finding = next((f for rank in range(len(observed)) for f in _of_rank(case, rank, direction, observed)), None)
        if finding is not None:
            yield finding
            return
    for rank, seen in enumerate(observed):
        group = tuple(sorted(case.mesh.group_of(rank, case.axis)))
        reductions = [one.collective for one in seen.sent or () if _reduces(one.collective, group)]
        total = sum(one.elements for one in reductions)
        holders, elements = tied_elements(case)
        if total > case.steps * (elements if len(holders) > 1 else 0):
            lines = "; ".join(one.describe() for one in reductions[:3])
            yield _finding(case, rank, f"more traffic than needed: no such reduction along {case.axis} is due: {lines}")
            return


def _of_rank(case: PipelineCase, rank: int, direction: str, observed: World) -> Iterator[Finding]:
    mesh, here = case.mesh, case.mesh.coordinate(rank, case.axis)
    members = mesh.group_of(rank, case.axis)
    found: Counter[tuple[int, str]] = Counter()
    for one in observed[rank].sent or ():
        what = one.collective
        if what.operation != direction or what.dtype is None:
            continue
        if what.peer not in members:
            yield _finding(case, rank, f"a message to or from a rank that has no part in it: {what.describe()}")
            return
        found[mesh.coordinate(what.peer, case.axis), what.dtype] += what.elements
    asked: Counter[tuple[int, str]] = Counter()
    for (source, target, dtype), elements in due(case).items():
        if here == (source if direction == "send" else target):
            asked[target if direction == "send" else source, dtype] += elements * case.steps
    holders, copies = tied_elements(case)
    for peer, dtype in sorted({*found, *asked}):
        got, least = found[peer, dtype], asked[peer, dtype]
        tie = case.steps * copies if here in holders and peer in holders else 0
        whole = "float" not in dtype
        if got < least or (not whole and got > least + tie):
            verb, way = ("sends", "to") if direction == "send" else ("receives", "from")
            more = "more traffic than needed" if got > least else "no traffic where some is needed"
            also = f", and up to {tie} of the tied weight" if tie else ""
            yield _finding(
                case,
                rank,
                f"{more}: {mesh.describe(rank)} {verb} {got} {dtype} elements {way} {case.axis}={peer}, where {least} "
                f"are due{also}",
            )
            return


def _reduces(what: Collective, group: tuple[int, ...]) -> bool:
    """Whether it is a collective of floating-point numbers among ranks of one pipeline."""
    floating = what.dtype is not None and "float" in what.dtype
    inside = set(what.group) <= set(group) and len(what.group) > 1
    return floating and inside and what.elements > 1 and what.operation not in _DIRECTIONS


def _finding(case: PipelineCase, rank: int, message: str) -> Finding:
    return Finding("traffic", message, rank, case.mesh.describe(rank))
