"""What a search has seen so far, and the row that it ends as."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from harness.bench import Trial
from harness.case_file import Reproducer
from harness.events import Failure, Row
from harness.fault import Fault, fault_class

#: Failures that are kept of one row when they are flaky: each is its own finding, none is shrunk.
_MOST_FLAKY = 5


@dataclass
class Tally:
    """examples: the cases that ran. known: the verdicts of those that failed, by the case's JSON. confirmed: the first
    failure, seen again in fresh processes; failed_at: when, by time.monotonic(). left_open: the cases in which some
    values could not be judged."""

    examples: int = 0
    rejected: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    meshes: set[Any] = field(default_factory=set)
    left_open: int = 0
    known: dict[str, Trial] = field(default_factory=dict)
    flaky: list[tuple[Any, Trial]] = field(default_factory=list)
    confirmed: Fault | None = None
    failed_at: float | None = None
    found_after: int | None = None

    def count(self, case: Any, trial: Trial, key: str) -> None:
        verdict = trial.verdict
        if verdict.rejected is not None:
            self.rejected += 1
            self.refusals[verdict.rejected] += 1
            return
        self.examples += 1
        self.meshes.add(case.mesh)
        self.left_open += verdict.facts.get("ambiguous", 0) > 0
        if verdict.findings:
            self.known[key] = trial
            if verdict.kind == "flaky":
                if len(self.flaky) < _MOST_FLAKY:
                    self.flaky.append((case, trial))
            elif self.confirmed is None:
                self.confirmed = fault_class(verdict.findings[0].kind)(case, trial)
                self.failed_at = time.monotonic()
                self.found_after = self.examples

    def no_time(self, time_budget: float | None) -> str:
        if self.examples == 0:
            return "no time was left of the time budget"
        return f"the time budget is used up: this row had {time_budget:.1f} s of it"

    def refused(self) -> str:
        return f"the candidate refused {self.rejected} cases, for example: {self.refusals.most_common(1)[0][0]}"

    def why_fewer(self, examples: int) -> str | None:
        """Why fewer cases ran than were asked for; None where they are enough."""
        if self.failed_at is None and self.examples < examples:
            if self.rejected:
                return self.refused() if self.examples == 0 else "the candidate refused too many cases"
            return "there are no more different cases within the limits"
        return None

    def row(self, candidate: str, subject: str, faults: list[Fault], stopped: str | None, seconds: float) -> Row:
        failing = [(fault.case, fault.trial) for fault in faults] + self.flaky
        failures = tuple(
            Failure(Reproducer(candidate, subject, case, trial.delays), trial.verdict, trial.history)
            for case, trial in failing
        )
        return Row(
            candidate=candidate,
            subject=subject,
            result="fault" if failures else "held" if self.examples else "nothing ran",
            examples=self.examples,
            meshes=len(self.meshes),
            rejected=self.rejected,
            refusals=tuple(self.refusals.most_common()),
            seconds=seconds,
            failures=failures,
            stopped=stopped,
            found_after=self.found_after,
            left_open=self.left_open,
        )
