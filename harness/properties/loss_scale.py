"""A loss scaler: scale, counters and the decision to skip are those of the transition function after every event, on
every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import strategies.loss_scale
from harness.candidate import NotOffered
from harness.find import Spec
from harness.observation import Observation
from harness.properties.base import Description, Property, World
from harness.properties.refusal import half_loaded, judge_refusal
from harness.properties.traffic import judge_traffic
from harness.scaling import SEEN, attempt, run
from harness.session import Session, phase
from harness.verdict import Finding, Verdict
from harness.world import RankContext
from reference.loss_scale import OF_CONFIGURATION, OF_STATE, Event, LossScaleCase, Step, expected, needed


def on_rank(context: RankContext, spec: Spec, case: LossScaleCase, before: World | None = None) -> Observation:
    """Goes through the events on this rank, or sees whether what is wrong is refused. before: what the processes saw
    that it takes over from."""
    candidate = Session.of(context, spec).on(case.mesh)
    if not candidate.offers("loss_scaler"):
        raise NotOffered(f"{spec.text} has no loss_scaler")
    if case.invalid:
        return attempt(case, context.rank, candidate.loss_scaler)
    with phase("its declarations"):
        due = tuple(candidate.traffic(case, needed(case)))
    earlier = None if before is None else before[context.rank]
    return replace(run(case, context.rank, candidate.loss_scaler, context.traffic, earlier), due=due)


def judge(case: LossScaleCase, description: Description, want: tuple[Step, ...], worlds: Sequence[World]) -> Verdict:
    """What was seen after each event, and the traffic."""
    seen = worlds[0]
    if case.invalid:
        refusal = judge_refusal(case.mesh, seen, _wrong(case))
        return replace(refusal, findings=(*refusal.findings, *half_loaded(case.mesh, seen)))
    return Verdict((*_first_wrong(case, want, seen), *judge_traffic(case.mesh, needed(case), seen)))


def _wrong(case: LossScaleCase) -> str:
    if case.invalid == "state_truncated":
        return "states that are cut short"
    if case.invalid in OF_STATE:
        return f"states of a scaler with another {OF_STATE[case.invalid]}"
    name, _ = OF_CONFIGURATION[str(case.invalid)]
    return f"scalers with {name}={getattr(case.asked, name)!r}"


def _first_wrong(case: LossScaleCase, want: tuple[Step, ...], seen: World) -> Iterator[Finding]:
    """All that is wrong after the first event after which something is: the rest follows from it."""
    for number, (event, step) in enumerate(zip(case.events, want, strict=True)):
        found = list(_wrong_after(case, number, event, step, seen))
        if found:
            yield from found
            return


def _wrong_after(case: LossScaleCase, number: int, event: Event, step: Step, seen: World) -> Iterator[Finding]:
    due: dict[str, float] = {"scale": step.state.scale, "good": step.state.good, "left": step.state.left}
    if case.scaling.kind == "constant":
        due = {"scale": step.state.scale}
    due = {"skipped": step.skipped, **due} if event.is_step else due
    for name in ("found", *due):
        held = [one.facts[SEEN][number].get(name) for one in seen]
        wanted = [event.hits(case.mesh, rank) if name == "found" else due[name] for rank in range(len(held))]
        bad = [r for r, (got, right) in enumerate(zip(held, wanted, strict=True)) if got is not None and got != right]
        if not bad:
            continue
        rank, place = bad[0], case.mesh.describe(bad[0])
        got, right = held[rank], wanted[rank]
        where = "on every rank" if len(bad) == len(held) else f"on {place}"
        differ = name != "found" and len({value for value in held if value is not None}) > 1
        message = f"{_LABELS[name]} is {got} {where} after event {number} ({_text(event)}); expected {right}"
        if differ:
            others = "; ".join(f"{case.mesh.describe(r)}: {held[r]}" for r in range(len(held)))
            message += ": ranks differ, in training they take different steps"
        yield Finding(
            "disagree" if differ else "mismatch", message, rank, place, f"{name}[{number}]", got=float(got),
            want=float(right), details=others if differ else "",
        )  # fmt: skip


_LABELS = {
    "found": "the check of the rank's own gradients",
    "skipped": "the decision to skip the step",
    "scale": "the scale",
    "good": "the count of good steps in a row",
    "left": "the count of overflows until the scale backs off",
}


def _text(event: Event) -> str:
    if event.what == "overflow":
        where = f" at {event.at} along {'-'.join(event.axes)}" if event.axes else " on all ranks"
        return f"{event.value}{where}"
    texts = {"interval": f"interval {event.interval}", "relaunch": "load in new processes"}
    return texts.get(event.what, event.what)


LOSS_SCALE = Property(
    subject="loss_scale",
    case_type=LossScaleCase,
    methods=("loss_scaler",),
    features=strategies.loss_scale.FEATURES,
    cases=strategies.loss_scale.cases,
    simpler=strategies.loss_scale.simpler,
    world=lambda case: case.mesh.size,
    on_rank="harness.properties.loss_scale:on_rank",
    expected=expected,
    judge=judge,
    carried_on=lambda case, world: world if case.relaunched is not None else None,
    uses_dtype=False,
)
