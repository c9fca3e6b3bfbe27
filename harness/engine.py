"""Draws cases with Hypothesis, has them judged, and shrinks what fails."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.configuration import set_hypothesis_home_dir

from harness.bench import Bench, checked
from harness.draws import register
from harness.events import Row
from harness.fault import Fault, fault_class, with_cause
from harness.polish import polish
from harness.properties.base import Property
from harness.steering import Steering, aim, steered
from harness.tally import Tally
from harness.world import Terminated
from harness.world.delays import Which
from reference.codec import encode
from strategies.scope import Scope

#: Shrinking belongs to the time budget, but a failure that is found at its end is worth so many seconds.
_LEAST_SHRINKING = 3.0

#: A candidate that refused so many cases, and took none, is not asked again: each costs new processes.
_MOST_REFUSED = 100


class Interrupted(BaseException):
    """A search was told to end. row: what came of it until then; by: the KeyboardInterrupt or Terminated."""

    def __init__(self, row: Row, by: BaseException) -> None:
        super().__init__(str(by))
        self.row = row
        self.by = by


class _Stop(BaseException):
    """Ends a search without a failure, for the reason given; no exception that Hypothesis handles."""


class _Enough(BaseException):
    """Ends Hypothesis' shrinking: it would draw on for minutes, where cases take long to draw."""


@dataclass(frozen=True)
class Limits:
    """How far a search goes. time_budget: seconds for one row, None for no limit. shrink_seconds: how long a failure
    may be shrunk, by Hypothesis and then again by the subject's own proposals. steered: the share of the examples, and
    of the time budget, for neighbours of the worst cases. It comes last, so that a seed draws the same cases before it
    on any machine: statistics depend on the order in which a machine sums. delays: which cases get some."""

    examples: int = 100
    seed: int = 0
    time_budget: float | None = None
    shrink_seconds: float = 30.0
    steered: float = 0.2
    delays: Which = "some"


@dataclass(frozen=True)
class _Clock:
    """When a search ends, by time.monotonic()."""

    limits: Limits
    started: float

    @property
    def ends(self) -> float:
        """No case is drawn after it."""
        return math.inf if self.limits.time_budget is None else self.started + self.limits.time_budget

    @property
    def steering_starts(self) -> float:
        budget = self.limits.time_budget
        return math.inf if budget is None else self.started + (1 - self.limits.steered) * budget

    def shrinking_ends(self, failed_at: float) -> float:
        """No simpler case is tried after it."""
        return max(self.ends, failed_at + _LEAST_SHRINKING)

    def drawing_ends(self, failed_at: float) -> float:
        """Hypothesis' part of shrinking. The subject's proposals get as much: they find what Hypothesis cannot."""
        return failed_at + min(self.limits.shrink_seconds, (self.shrinking_ends(failed_at) - failed_at) / 2)


def search(
    bench: Bench,
    subject: Property,
    scope: Scope,
    limits: Limits,
    tell: Callable[[bool], None] = lambda failing: None,
) -> Row:
    """Runs a subject on one candidate. The same seed draws the same cases in the same order. The last of them, which
    are drawn near the worst ones, also depend on the numbers that came out.

    ``tell`` is called after every case that ran, with whether it failed.

    Raises Interrupted, with the row so far and the failure that was confirmed, where a signal ends it.
    """
    started, tally = time.monotonic(), Tally()

    def row(faults: list[Fault], stopped: str | None) -> Row:
        return tally.row(bench.spec.text, subject.subject, faults, stopped, time.monotonic() - started)

    try:
        return row(*_searched(bench, subject, scope, limits, tell, tally, _Clock(limits, started)))
    except (KeyboardInterrupt, Terminated) as error:
        faults = [] if tally.confirmed is None else [tally.confirmed]
        stopped = "interrupted" if not faults else "interrupted while it was shrunk: the case is the first that failed"
        raise Interrupted(row(faults, stopped), error) from None


def _searched(
    bench: Bench,
    subject: Property,
    scope: Scope,
    limits: Limits,
    tell: Callable[[bool], None],
    tally: Tally,
    clock: _Clock,
) -> tuple[list[Fault], str | None]:
    """The faults, shrunk, and why fewer cases ran than were asked for."""
    faults, stopped, hurried = [], None, False
    simplest: dict[type[Fault], Fault] = {}  # Hypothesis only tries what is simpler than what failed before

    def judge(case: Any) -> None:
        key = json.dumps(encode(case))
        trial = tally.known.get(key)
        if trial is None:
            now = time.monotonic()
            if tally.failed_at is not None and now > clock.drawing_ends(tally.failed_at):
                raise _Enough
            if tally.failed_at is None and now > clock.ends:
                raise _Stop(tally.no_time(limits.time_budget))
            # Once a failure is confirmed, shrinking believes what it sees; the end of it is confirmed again.
            if tally.confirmed is None:
                trial = checked(bench, subject, case, limits.delays)
            else:
                trial = bench.once(subject, case, tally.confirmed.trial.delays)
            tally.count(case, trial, key)
            tell(bool(trial.verdict.findings))
        if trial.verdict.rejected is not None:
            if tally.examples == 0 and tally.rejected >= _MOST_REFUSED:
                raise _Stop(tally.refused())
            hypothesis.reject()
        kind = trial.verdict.kind
        if kind is not None and kind != "flaky":
            fault = fault_class(kind)(case, trial)
            simplest[type(fault)] = fault
            raise fault
        aim(trial.verdict)

    def steers() -> bool:
        """Until something fails: after that, what lies near it would fail likewise."""
        ran = tally.examples >= (1 - limits.steered) * limits.examples
        return tally.failed_at is None and (ran or time.monotonic() > clock.steering_starts)

    test = hypothesis.seed(limits.seed)(_settings(limits)(hypothesis.given(subject.cases(scope))(judge)))
    try:
        with steered(Steering(steers)):
            test()
    except _Stop as stop:
        stopped = str(stop)
    except _Enough:
        faults, hurried = list(simplest.values()), True
    except Fault as fault:
        faults = [fault]
    except BaseExceptionGroup as group:
        faults = [e for e in group.exceptions if isinstance(e, Fault)]
        if len(faults) != len(group.exceptions):
            raise
    except hypothesis.errors.Unsatisfiable:
        stopped = tally.refused() if tally.rejected else "no case could be drawn"
    if tally.confirmed is not None:
        assert tally.failed_at is not None
        ends = clock.shrinking_ends(tally.failed_at)
        polished = []

        def told(failing: bool) -> None:
            tally.examples += 1
            tell(failing)

        for found in faults:
            seconds = min(limits.shrink_seconds, ends - time.monotonic())
            began = time.monotonic()
            polished.append(_polished(bench, subject, scope, seconds, found, tally.confirmed, told))
            hurried |= time.monotonic() - began > seconds
        # Two that could not be seen again are one.
        faults = [with_cause(found, tally.confirmed) for found in dict.fromkeys(polished)]
        if hurried and stopped is None:
            stopped = "not shrunk to the end: there was no more time"
    return faults, stopped or tally.why_fewer(limits.examples)


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
        trial = bench.once(subject, case, fault.trial.delays)
        tell(bool(trial.verdict.findings))
        if trial.verdict.kind != fault.trial.verdict.kind:
            return False
        best = type(fault)(case, trial)
        return True

    polish(fault.case, lambda case: subject.simpler(case, scope), fails, seconds)
    if best.case == confirmed.case and type(best) is type(confirmed):
        return confirmed  # which was seen in fresh processes
    trial = bench.afresh(subject, best.case, fault.trial.delays)
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
