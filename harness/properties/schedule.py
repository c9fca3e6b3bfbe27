"""Schedule: lists of actions that compute a pipeline, without anything being computed."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Sequence
from typing import Any

import strategies.schedule
from harness.candidate import NotOffered
from harness.find import Spec
from harness.local import WrongAdapter
from harness.observation import Observation
from harness.properties.base import Description, Property, World
from harness.schedule import PipelineSchedule
from harness.session import Session, phase
from harness.verdict import Finding, Verdict
from harness.world import RankContext
from reference.schedule import Lists, ScheduleCase, lists
from reference.schedule_rules import check
from reference.schedule_tables import Broken


def on_rank(context: RankContext, spec: Spec, case: ScheduleCase) -> Observation:
    """The candidate's lists for all ranks of the pipeline, as numbers."""
    candidate = Session.of(context, spec).make()
    with phase("schedule"):
        found = candidate.schedule(case)
    if found is None:
        raise NotOffered(f"it has no {case.kind} schedule")
    made = found if isinstance(found, PipelineSchedule) else PipelineSchedule(found)
    given: object = made.actions
    try:
        if isinstance(given, str | bytes):
            raise TypeError("a text is no list of lists")
        numbers = lists(case, made.actions, made.placement, made.receives)
    except TypeError as error:
        raise WrongAdapter(f"schedule returned {reprlib.repr(found)}; expected lists of actions") from error
    except ValueError as error:
        raise WrongAdapter(f"what schedule returned cannot be read: {error}") from error
    return Observation(facts={f.name: getattr(numbers, f.name) for f in dataclasses.fields(numbers)})


def judge(case: ScheduleCase, description: Description, want: None, worlds: Sequence[World]) -> Verdict:
    """Its facts hold the lists and what was found of them, for those who want to show them."""
    found = Lists(**worlds[0][0].facts)
    checked = check(case, found)
    findings = [_finding(case, broken) for broken in checked.broken]
    if findings and checked.broken[0].rule == "known actions":
        findings[0] = dataclasses.replace(findings[0], cause=_cause(case, found))
    return Verdict(tuple(findings), facts={"lists": found, "checked": checked})


def _finding(case: ScheduleCase, broken: Broken) -> Finding:
    place = None if broken.rank is None else case.mesh.describe(broken.rank)
    return Finding("mismatch", broken.message, broken.rank, place, broken.rule)


def _cause(case: ScheduleCase, found: Lists) -> str | None:
    """A known mistake that makes these actions of micro-batches that there are not."""
    p, m = case.stages, case.micro_batches
    counts = [int(actions[:, 2].max(initial=-1)) + 1 for actions in found.actions]
    if case.kind == "1f1b" and counts == [m] * (p - 1) + [m + 1]:
        return "the last rank counts its micro-batches from 1"
    # A rank's warm-up is counted with or without the forward that is followed by the first backward.
    if case.kind == "1f1b" and any(counts == [max(m, p - rank - k) for rank in range(p)] for k in (0, 1)):
        return f"the warm-up takes as many micro-batches as stages follow, also where there are only {m}"
    return None


def _expected(case: Any) -> None:
    """Nothing: the rules look at what the candidate made."""


SCHEDULE = Property(
    subject="schedule",
    case_type=ScheduleCase,
    methods=("schedule",),
    features=strategies.schedule.FEATURES,
    cases=strategies.schedule.cases,
    simpler=strategies.schedule.simpler,
    world=lambda case: 1,
    on_rank="harness.properties.schedule:on_rank",
    expected=_expected,
    judge=judge,
    uses_dtype=False,
)
