"""The same values on all ranks of an axis, where each has a part of its own."""

from __future__ import annotations

from harness.oracle.compare import different
from harness.oracle.patterns.evidence import Evidence, Values
from harness.oracle.patterns.fit import information
from harness.oracle.patterns.wording import listed


def alike_along_an_axis(evidence: Evidence) -> str | None:
    """Shards of different sizes count as alike where the shorter is the beginning of the longer in memory."""
    axes = [name for name, size in evidence.mesh.axes if size > 1 and _alike(evidence, name)]
    zeros = [got * 0 for got in evidence.got]
    if not axes or sum(information(evidence, zeros)) < evidence.margin + len(evidence.mesh.axes):
        return None
    along = listed(axes)
    if evidence.name.endswith(".initial"):
        return (
            f"{evidence.name} is the same on all ranks of {along}: every shard was initialised from the same seed, or "
            "copied from one rank"
        )
    return (
        f"{evidence.name} is the same on all ranks of {along}, where each has a part of its own: every rank computed "
        f"with the same data or the same seed, or a collective over {along} made them alike"
    )


def _alike(evidence: Evidence, axis: str) -> bool:
    """Whether every group along the axis that has a wrong rank holds one shard's values many times."""
    telling: set[int] = set()
    for group in evidence.mesh.groups(axis).tolist():
        if not any(evidence.wrong[rank].any() for rank in group):
            continue
        held = [rank for rank in group if evidence.got[rank].size]
        places = {(evidence.windows[rank].lead, evidence.windows[rank].ranges) for rank in held}
        if len(held) < 2 or len(places) != len(held):
            return False
        longest = max(held, key=lambda rank: evidence.got[rank].size)
        for rank in held:
            if not _begins(evidence.got[longest], evidence.got[rank]):
                return False
            if rank != longest and not _begins(evidence.wants[longest], evidence.wants[rank]):
                telling.add(rank)
        # Shards of one value are alike whatever they were made from.
        if not different(evidence.got[longest], evidence.got[longest].flat[0]).any():
            return False
    return bool(telling)


def _begins(longer: Values, shorter: Values) -> bool:
    return not different(longer.ravel()[: shorter.size], shorter.ravel()).any()
