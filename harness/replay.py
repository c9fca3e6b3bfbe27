"""Runs one reproducer again, in new processes."""

from __future__ import annotations

from harness.bench import Bench
from harness.case_file import Reproducer
from harness.properties import property_of
from harness.verdict import Verdict
from harness.verification import require_deadline, require_world


def replay(reproducer: Reproducer, *, deadline: float = 30.0) -> Verdict:
    """The verdict on the case, from fresh processes.

    Raises CandidateUnusable, UnknownCandidate, WorldTooLarge or another WrongUse where it cannot run here.
    """
    subject = property_of(reproducer.subject)
    require_deadline(deadline)
    require_world(subject.world(reproducer.case))
    with Bench(reproducer.candidate, deadline=deadline) as bench:
        return bench.check(subject, reproducer.case).verdict
