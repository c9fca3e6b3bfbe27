"""Draws cases with Hypothesis, has them judged, and shrinks what fails."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.configuration import set_hypothesis_home_dir

from harness.bench import Bench, Trial
from harness.case_file import Reproducer
from harness.draws import register
from harness.events import Failure, Row
from harness.fault import Fault, fault_class, with_cause
from harness.polish import polish
from harness.properties.base import Property
from reference.codec import encode
from strategies.scope import Scope

#: Failures that are kept of one row when they are flaky: each is its own finding, none is shrunk.
_MOST_FLAKY = 5


#: Shrinking belongs to the time budget, but a failure that is found at its end is worth so many seconds.
_LEAST_SHRINKING = 3.0

#: A candidate that refused so many cases, and took none, is not asked again: each costs new processes.
_MOST_REFUSED = 100


class _Stop(BaseException):
    """Ends a search without a failure, for the reason given; no exception that Hypothesis handles."""


@dataclass(frozen=True)
class Limits:
    """How far a search goes. time_budget: seconds for one row, None for no limit. shrink_seconds: how long a failure
    may be shrunk, by Hypothesis and then again by the subject's own proposals."""

    examples: int = 100
    seed: int = 0
    time_budget: float | None = None
    shrink_seconds: float = 30.0


@dataclass(frozen=True)
class _Clock:
    """When a search ends, by time.monotonic()."""

    limits: Limits
    started: float

    @property
    def ends(self) -> float:
        """No case is drawn after it."""
        return math.inf if self.limits.time_budget is None else self.started + self.limits.time_budget

    def shrinking_ends(self, failed_at: float) -> float:
        """No simpler case is tried after it."""
        return max(self.ends, failed_at + _LEAST_SHRINKING)

    def drawing_ends(self, failed_at: float) -> float:
        """Hypothesis' part of shrinking. The subject's proposals get as much: they find what Hypothesis cannot."""
        return failed_at + min(self.limits.shrink_seconds, (self.shrinking_ends(failed_at) - failed_at) / 2)


@dataclass
class _Tally:
    """What a search has seen so far."""

    examples: int = 0
    rejected: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    meshes: set[Any] = field(default_factory=set)
    known: dict[str, Trial] = field(default_factory=dict)
    flaky: list[tuple[Any, Trial]] = field(default_factory=list)
    confirmed: Fault | None = None
    failed_at: float | None = None
    found_after: int | None = None


def search(
    bench: Bench,
    subject: Property,
    scope: Scope,
    limits: Limits,
    tell: Callable[[bool], None] = lambda failing: None,
) -> Row:
    """Runs a subject on one candidate. The same seed draws the same cases in the same order.

    ``tell`` is called after every case that ran, with whether it failed.
    """
    started, tally = time.monotonic(), _Tally()
    clock = _Clock(limits, started)
    faults, stopped = [], None

    def judge(case: Any) -> None:
        key = json.dumps(encode(case))
        trial = tally.known.get(key)
        if trial is None:
            now = time.monotonic()
            if tally.failed_at is not None and now > clock.drawing_ends(tally.failed_at):
                return  # shrinking has had its time: what is known stays the answer
            if tally.failed_at is None and now > clock.ends:
                raise _Stop(_no_time(tally, limits))
            # Once a failure is confirmed, shrinking believes what it sees; the end of it is confirmed again.
            trial = bench.check(subject, case) if tally.confirmed is None else bench.once(subject, case)
            _count(tally, case, trial, key)
            tell(bool(trial.verdict.findings))
        if trial.verdict.rejected is not None:
            if tally.examples == 0 and tally.rejected >= _MOST_REFUSED:
                raise _Stop(_refused(tally))
            hypothesis.reject()
        kind = trial.verdict.kind
        if kind is not None and kind != "flaky":
            raise fault_class(kind)(case, trial)

    test = hypothesis.seed(limits.seed)(_settings(limits)(hypothesis.given(subject.cases(scope))(judge)))
    try:
        test()
    except _Stop as stop:
        stopped = str(stop)
    except Fault as fault:
        faults = [fault]
    except BaseExceptionGroup as group:
        faults = [e for e in group.exceptions if isinstance(e, Fault)]
        if len(faults) != len(group.exceptions):
            raise
    except hypothesis.errors.Unsatisfiable:
        stopped = _refused(tally) if tally.rejected else "no case could be drawn"
    if tally.confirmed is not None:
        assert tally.failed_at is not None
        ends = clock.shrinking_ends(tally.failed_at)
        polished = []
        for found in faults:
            seconds = min(limits.shrink_seconds, ends - time.monotonic())
            polished.append(_polished(bench, subject, scope, seconds, found, tally.confirmed, tell))
        # Two that could not be seen again are one.
        faults = [with_cause(found, tally.confirmed) for found in dict.fromkeys(polished)]
    return _row(bench, subject, tally, faults, stopped or _why_fewer(tally, limits), time.monotonic() - started)


def _polished(
    bench: Bench,
    subject: Property,
    scope: Scope,
    seconds: float,
    fault: Fault,
    confirmed: Fault,
    tell: Callable[[bool], None],
) -> Fault:
    """The fault on the simplest case that has it, seen in fresh processes; else the one that was confirmed first."""
    best = fault

    def fails(case: Any) -> bool:
        nonlocal best
        trial = bench.once(subject, case)
        tell(bool(trial.verdict.findings))
        if trial.verdict.kind != fault.trial.verdict.kind:
            return False
        best = type(fault)(case, trial)
        return True

    polish(fault.case, lambda case: subject.simpler(case, scope), fails, seconds)
    if best.case == confirmed.case and type(best) is type(confirmed):
        return confirmed  # which was seen in fresh processes
    trial = bench.afresh(subject, best.case)
    if trial.verdict.kind == fault.trial.verdict.kind:
        return type(fault)(best.case, trial)
    return confirmed


@contextlib.contextmanager
def caches_elsewhere() -> Iterator[None]:
    """Hypothesis keeps what it caches in a folder that is removed, for a program of our own. It has no database, but it
    writes down the constants of the modules that it sees. Somebody's own test run has its own folder."""
    with tempfile.TemporaryDirectory(prefix="shardproof-") as folder:
        set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            set_hypothesis_home_dir(None)


def _settings(limits: Limits) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=limits.examples,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        print_blob=False,
        report_multiple_bugs=True,
        backend=register(),
    )


def _count(tally: _Tally, case: Any, trial: Trial, key: str) -> None:
    verdict = trial.verdict
    if verdict.rejected is not None:
        tally.rejected += 1
        tally.refusals[verdict.rejected] += 1
        return
    tally.examples += 1
    tally.meshes.add(case.mesh)
    if verdict.findings:
        tally.known[key] = trial
        if verdict.kind == "flaky":
            if len(tally.flaky) < _MOST_FLAKY:
                tally.flaky.append((case, trial))
        elif tally.confirmed is None:
            tally.confirmed = fault_class(trial.verdict.findings[0].kind)(case, trial)
            tally.failed_at = time.monotonic()
            tally.found_after = tally.examples


def _no_time(tally: _Tally, limits: Limits) -> str:
    if tally.examples == 0:
        return "no time was left of the time budget"
    return f"the time budget is used up: this row had {limits.time_budget:.1f} s of it"


def _refused(tally: _Tally) -> str:
    return f"the candidate refused {tally.rejected} cases, for example: {tally.refusals.most_common(1)[0][0]}"


def _why_fewer(tally: _Tally, limits: Limits) -> str | None:
    if tally.failed_at is None and tally.examples < limits.examples:
        if tally.rejected:
            return _refused(tally) if tally.examples == 0 else "the candidate refused too many cases"
        return "there are no more different cases within the limits"
    return None


def _row(
    bench: Bench, subject: Property, tally: _Tally, faults: list[Fault], stopped: str | None, seconds: float
) -> Row:
    failing = [(fault.case, fault.trial) for fault in faults] + tally.flaky
    failures = tuple(
        Failure(Reproducer(bench.spec.text, subject.subject, case), trial.verdict, trial.history)
        for case, trial in failing
    )
    return Row(
        candidate=bench.spec.text,
        subject=subject.subject,
        result="fault" if failures else "held" if tally.examples else "nothing ran",
        examples=tally.examples,
        meshes=len(tally.meshes),
        rejected=tally.rejected,
        refusals=tuple(tally.refusals.most_common()),
        seconds=seconds,
        failures=failures,
        stopped=stopped,
        found_after=tally.found_after,
    )
