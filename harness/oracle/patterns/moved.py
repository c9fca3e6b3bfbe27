"""Right values in the wrong place: the slice of another rank, a slice that starts elsewhere, a transpose."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from harness.oracle.compare import different
from harness.oracle.patterns.evidence import Evidence, Values
from harness.oracle.patterns.fit import Explanation, beyond, fit
from harness.oracle.patterns.wording import listed, numbers, of_ranks
from reference.layout import Window


def moved_shards(evidence: Evidence) -> str | None:
    """Wrong ranks hold the slices that belong to others. Ranks that differ along one axis only are asked first."""
    sources: dict[int, int] = {}
    for rank in evidence.wrong_ranks:
        source = next((s for s in _by_nearness(evidence, rank) if _holds(evidence, rank, s)), None)
        if source is None:
            return None
        sources[rank] = source
    explained = tuple(_slice(evidence, evidence.want, sources.get(rank, rank)) for rank in range(evidence.mesh.size))
    allowed = None
    if evidence.tolerance is not None:
        allowed = tuple(_slice(evidence, evidence.tolerance, sources.get(r, r)) for r in range(evidence.mesh.size))
    found = fit(evidence, Explanation(explained, allowed))
    places = len({(part.lead, part.ranges) for part in evidence.windows})
    moves = len({(_place(evidence, rank), _place(evidence, source)) for rank, source in sources.items()})
    if found is None or not found.sure(evidence, float(places) ** moves):
        return None
    return f"{_moves(evidence, sources)}: shards in the wrong order"


def _by_nearness(evidence: Evidence, rank: int) -> list[int]:
    at = evidence.mesh.coordinates(rank)

    def distance(other: int) -> tuple[int, int]:
        there = evidence.mesh.coordinates(other)
        return sum(int(there[name]) != int(at[name]) for name in at), other

    return sorted((other for other in range(evidence.mesh.size) if other != rank), key=distance)


def _holds(evidence: Evidence, rank: int, source: int) -> bool:
    if (
        evidence.windows[source].shape != evidence.windows[rank].shape
        or not different(evidence.wants[source], evidence.wants[rank]).any()
    ):
        return False
    room = np.zeros(evidence.got[rank].shape) if evidence.limits is None else evidence.limits[source]
    return not beyond(evidence.got[rank], evidence.wants[source], room).any()


def _slice(evidence: Evidence, values: Values, rank: int) -> Values:
    return evidence.windows[rank].take(values)


def _place(evidence: Evidence, rank: int) -> tuple[object, object]:
    return evidence.windows[rank].lead, evidence.windows[rank].ranges


def _moves(evidence: Evidence, sources: dict[int, int]) -> str:
    pairs = [f"rank {rank} holds the slice of {evidence.name} that belongs to rank {s}" for rank, s in sources.items()]
    if len(pairs) > 3:
        short = ", ".join(f"{rank} that of {source}" for rank, source in itertools.islice(sources.items(), 1, 6))
        return f"{pairs[0]}, rank {short}{' and so on' if len(pairs) > 6 else ''}"
    return listed(pairs)


def shifted_cut(evidence: Evidence) -> str | None:
    """A slice of the right length that starts elsewhere along one dimension: the tensor is cut in other pieces."""
    starts: dict[int, tuple[int, int]] = {}
    parts: list[Window] = list(evidence.windows)
    for rank in evidence.wrong_ranks:
        found = next(((d, part) for d, part in _other_starts(evidence, rank) if _equals(evidence, rank, part)), None)
        if found is None:
            return None
        dim, parts[rank] = found
        starts[rank] = dim, parts[rank].ranges[dim][0]
    if len({dim for dim, _ in starts.values()}) != 1:
        return None
    explained = tuple(part.take(evidence.want) for part in parts)
    tolerance = evidence.tolerance
    allowed = None if tolerance is None else tuple(part.take(tolerance) for part in parts)
    fitted = fit(evidence, Explanation(explained, allowed))
    choices = float(sum(evidence.want.shape)) ** len(set(starts.values()))
    if fitted is None or not fitted.sure(evidence, choices):
        return None
    rank, (dim, start) = next(iter(starts.items()))
    lead = len(parts[rank].lead)
    due = evidence.windows[rank].ranges[dim][0]
    return (
        f"{of_ranks(evidence, list(starts))} is a slice that starts elsewhere along dimension {lead + dim} (rank "
        f"{rank}: at {start} instead of {due}): the dimension is cut into pieces of other sizes"
    )


def _other_starts(evidence: Evidence, rank: int) -> Iterator[tuple[int, Window]]:
    part = evidence.windows[rank]
    whole = evidence.want.shape[len(part.lead) :]
    for dim, (start, length) in enumerate(part.ranges):
        for other in sorted(range(whole[dim] - length + 1), key=lambda o, s=start: (abs(o - s), o)):  # type: ignore[misc]
            if other != start and length:
                yield dim, Window(part.lead, (*part.ranges[:dim], (other, length), *part.ranges[dim + 1 :]))


def _equals(evidence: Evidence, rank: int, part: Window) -> bool:
    tolerance = evidence.tolerance
    room = np.zeros(part.shape) if tolerance is None else part.take(tolerance)
    return not beyond(evidence.got[rank], part.take(evidence.want), room).any()


def transposed(evidence: Evidence) -> str | None:
    """Two dimensions swapped, or the memory of the transpose read in order: a view where a transpose is due."""
    dims = max((want.ndim for want in evidence.wants), default=0)
    pairs = list(itertools.combinations(range(dims), 2))
    for a, b in pairs:
        explained = tuple(_swapped(want, a, b) for want in evidence.wants)
        limits = evidence.limits
        allowed = None if limits is None else tuple(_swapped(limit, a, b) for limit in limits)
        found = fit(evidence, Explanation(explained, allowed))
        if found is None or not found.sure(evidence, len(pairs)):
            continue
        square = all(evidence.wants[rank].shape[a] == evidence.wants[rank].shape[b] for rank in found.ranks)
        who = of_ranks(evidence, found.ranks)
        if square:
            return f"{who} is transposed: dimensions {numbers((a, b))} of the rank's part are swapped"
        return (
            f"{who} has the values in the order of its transpose (dimensions {numbers((a, b))} of the rank's part): "
            "memory read in order where the strides say otherwise"
        )
    return None


def _swapped(values: Values, a: int, b: int) -> Values:
    if values.ndim <= b:
        return values
    return values.swapaxes(a, b).reshape(values.shape)
