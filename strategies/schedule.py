"""Draws pipeline schedules: kinds, and counts of ranks, chunks and micro-batches around the borders between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from hypothesis import strategies as st

from reference.schedule import V_SHAPED, ScheduleCase, ScheduleKind
from strategies.scope import Scope

#: The optional features of the subject.
FEATURES = {
    "schedule_gpipe": "GPipe",
    "schedule_gpipe_chunks": "GPipe with several chunks a rank (looped, breadth first)",
    "schedule_1f1b_few": "1F1B with fewer micro-batches than ranks",
    "schedule_interleaved": "interleaved 1F1B",
    "schedule_interleaved_few": "interleaved schedules with fewer micro-batches than ranks",
    "schedule_interleaved_uneven": "interleaved schedules of more micro-batches than ranks, but no multiple of them",
    "schedule_interleaved_zero_bubble": "interleaved 1F1B with its backwards split in two",
    "schedule_zbv": "ZB-V, with split backwards and stages in a V",
    "schedule_dualpipev": "DualPipeV, of at least twice as many micro-batches as ranks",
}

MOST_STAGES, MOST_CHUNKS, MOST_MICRO_BATCHES = 64, 8, 256
#: Most cases are small; of the others (chunk, micro-batch, rank) triples there are at most so many.
_FEW_STAGES, _FEW_CHUNKS, _FEW_MICRO_BATCHES, _MOST_PLACES = 8, 4, 24, 1 << 14


@st.composite
def cases(draw: st.DrawFn, scope: Scope) -> ScheduleCase:
    """A case within the scope; 1F1B, of at least as many micro-batches as ranks, needs no feature."""
    kinds = [kind for kind in get_args(ScheduleKind) if kind == "1f1b" or scope.has(f"schedule_{kind}")]
    kind = draw(st.sampled_from(kinds))
    large = draw(st.integers(0, 5)) == 5
    p = draw(st.integers(1, min(MOST_STAGES if large else _FEW_STAGES, scope.largest_mesh)))
    v = _chunks(draw, scope, kind, MOST_CHUNKS if large else _FEW_CHUNKS)
    most = max(1, min(MOST_MICRO_BATCHES, _MOST_PLACES // (p * v))) if large else _FEW_MICRO_BATCHES
    return ScheduleCase(kind, p, _micro_batches(draw, scope, kind, p, max(most, 2 * p)), v)


def _chunks(draw: st.DrawFn, scope: Scope, kind: ScheduleKind, most: int) -> int:
    if kind in V_SHAPED:
        return 2
    if kind == "1f1b" or (kind == "gpipe" and not scope.has("schedule_gpipe_chunks")):
        return 1
    return draw(st.integers(1, most))


def _micro_batches(draw: st.DrawFn, scope: Scope, kind: ScheduleKind, p: int, most: int) -> int:
    few, uneven = {
        "1f1b": (scope.has("schedule_1f1b_few"), True),
        "interleaved": (scope.has("schedule_interleaved_few"), scope.has("schedule_interleaved_uneven")),
        "interleaved_zero_bubble": (scope.has("schedule_interleaved_few"), scope.has("schedule_interleaved_uneven")),
    }.get(kind, (True, True))
    if kind == "dualpipev":
        return draw(st.integers(2 * p, most))
    if few and p > 1 and draw(st.integers(0, 2)) == 0:
        return draw(st.integers(1, p - 1))
    if uneven and draw(st.booleans()):
        return draw(st.integers(p, most))
    return p * draw(st.integers(1, most // p))


def simpler(case: ScheduleCase, scope: Scope) -> Iterator[ScheduleCase]:
    """Simpler cases of the same kind, from the smallest up."""
    chunks = [2] if case.kind in V_SHAPED else sorted({1, 2, case.chunks})
    found = [
        ScheduleCase(case.kind, p, m, v)
        for p in _smaller(case.stages)
        for v in chunks
        if v <= case.chunks
        for m in _smaller(case.micro_batches)
        if _within(case.kind, p, m, scope)
    ]
    yield from sorted((made for made in found if _measure(made) < _measure(case)), key=_measure)


def _smaller(count: int) -> list[int]:
    return sorted({n for n in (1, 2, 3, 4, count // 2, count - 1, count) if 1 <= n <= count})


def _within(kind: ScheduleKind, p: int, m: int, scope: Scope) -> bool:
    if kind == "dualpipev":
        return m >= 2 * p
    if kind == "1f1b":
        return m >= p or scope.has("schedule_1f1b_few")
    if kind in ("interleaved", "interleaved_zero_bubble"):
        return m % p == 0 or scope.has("schedule_interleaved_few" if m < p else "schedule_interleaved_uneven")
    return True


def _measure(case: ScheduleCase) -> tuple[int, int, int, int]:
    return case.stages * case.chunks * case.micro_batches, case.stages, case.chunks, case.micro_batches
