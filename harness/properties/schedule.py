"""Schedule: lists of actions that compute a pipeline, without anything being computed."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Sequence
from typing import Any

import strategies.schedule
from harness.candidate import NotOffered
from harness.find import Spec
from harness.local import WrongResult
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
        raise NotOffered("schedule returned None")
    made = found if isinstance(found, PipelineSchedule) else PipelineSchedule(found)
    try:
        numbers = lists(case, made.actions, made.placement, made.receives)
    except TypeError as error:
        raise WrongResult(f"schedule returned {reprlib.repr(found)}; expected lists of actions") from error
    except ValueError as error:
        raise WrongResult(f"what schedule returned cannot be read: {error}") from error
    return Observation(facts={f.name: getattr(numbers, f.name) for f in dataclasses.fields(numbers)})


def judge(case: ScheduleCase, description: Description, want: None, worlds: Sequence[World]) -> Verdict:
    """Its facts hold the lists and what was found of them, for those who want to show them."""
    found = Lists(**worlds[0][0].facts)
    checked = check(case, found)
    findings = tuple(_finding(case, broken) for broken in checked.broken)
    return Verdict(findings, facts={"lists": found, "checked": checked})


def _finding(case: ScheduleCase, broken: Broken) -> Finding:
    place = None if broken.rank is None else case.mesh.describe(broken.rank)
    return Finding("mismatch", broken.message, broken.rank, place, broken.rule)


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
