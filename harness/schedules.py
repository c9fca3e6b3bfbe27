"""One schedule of one candidate, listed on a rank and judged, for those who want to see it."""

from __future__ import annotations

from typing import Any, get_args

from harness.bench import Bench, CandidateUnusable
from harness.case_file import Reproducer
from harness.errors import WrongUse
from harness.events import Failure
from harness.properties.schedule import SCHEDULE
from harness.replay import require_memory
from harness.verdict import Verdict
from harness.verification import require_deadline
from reference.schedule import ScheduleCase, ScheduleKind


def case_of(kind: str, stages: int, micro_batches: int, chunks: int) -> ScheduleCase:
    """The case of what was typed. Raises WrongUse for one that cannot be, or does not fit into the memory."""
    if kind not in get_args(ScheduleKind):
        raise WrongUse(f"unknown schedule {kind!r}: expected one of {', '.join(get_args(ScheduleKind))}")
    known: Any = kind
    try:
        case = ScheduleCase(known, stages, micro_batches, chunks)
    except ValueError as error:
        raise WrongUse(str(error)) from error
    require_memory(case, 1)
    return case


def tried(candidate: str, case: ScheduleCase, deadline: float) -> Failure:
    """What came of it, as a failure whose verdict may be that it holds. Raises WrongUse."""
    require_deadline(deadline)
    try:
        with Bench(candidate, deadline=deadline) as bench:
            if not SCHEDULE.offered(bench.description):
                verdict = Verdict(rejected="it has no schedule")
            else:
                verdict = bench.check(SCHEDULE, case).verdict
    except CandidateUnusable as error:
        return Failure(Reproducer(candidate, "schedule", None), Verdict(error.findings))
    return Failure(Reproducer(candidate, "schedule", case), verdict)
