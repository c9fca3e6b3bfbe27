"""What the ranks decided in each step, exactly: whether it is skipped, the scale and its counters, and the count of
steps. And nothing but the scale may move where a step is skipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.endings import name_ranks
from harness.mixed_precision_steps import MOVED, SEEN, SKIPPED
from harness.properties.base import World
from harness.properties.resumed import some
from harness.verdict import Finding
from reference.mixed_precision import MixedPrecisionCase
from reference.mixed_precision_steps import Planned
from reference.train_step import TrainStepCase

Case = MixedPrecisionCase | TrainStepCase

_LABELS = {
    "skipped": "the decision to skip the step",
    "scale": "the scale",
    "good": "the count of good steps in a row",
    "left": "the count of overflows until the scale backs off",
    "steps": "the count of steps that were not skipped",
}


def judge_decisions(case: Case, plans: Sequence[Planned], seen: World) -> Iterator[Finding]:
    """All that is wrong in the first step in which something is: the rest follows from it."""
    for step, planned in enumerate(plans):
        found = [*_wrong_in(case, step, planned, seen), *_moved_in(case, step, planned, seen)]
        if found:
            yield from found
            return


def stuck(case: Case, plans: Sequence[Planned], told: Sequence[str | None]) -> str | None:
    """Who did what in the first step that a rank decided wrongly, or that some ranks finished and others did not; None
    where there is none. told: `harness.mixed_precision_steps.decided` of each rank."""
    decided = [[letter == SKIPPED for letter in text or ""] for text in told]
    step = next((i for i, one in enumerate(plans) if not _alike(one, [steps[i : i + 1] for steps in decided])), None)
    if step is None:
        return None
    due = "skipped" if plans[step].skipped else "made"
    ranks: dict[str, list[int]] = {"skipped it": [], "made it": [], "had not finished it": []}
    for rank, steps in enumerate(decided):
        did = "had not finished it" if len(steps) == step else "skipped it" if steps[step] else "made it"
        ranks[did].append(rank)
    said = [f"{name_ranks(those, len(told))} {did}" for did, those in ranks.items() if those]
    return f"step {step} is to be {due} ({_cause(case, step, plans[step])}): {', '.join(said)}"


def _alike(planned: Planned, did: Sequence[Sequence[bool]]) -> bool:
    """Whether no rank has finished the step, or all have, and have decided as they should."""
    return not any(did) or all(list(one) == [planned.skipped] for one in did)


def _wrong_in(case: Case, step: int, planned: Planned, seen: World) -> Iterator[Finding]:
    due = {"skipped": planned.skipped, "scale": planned.after.scale, "steps": planned.t + (not planned.skipped)}
    if case.scaling.kind == "dynamic":
        due |= {"good": planned.after.good, "left": planned.after.left}
    for name, right in due.items():
        held = [one.facts[SEEN][step].get(name) for one in seen]
        bad = [rank for rank, got in enumerate(held) if got is not None and got != right]
        if not bad:
            continue
        rank, place = bad[0], case.mesh.describe(bad[0])
        differ = len({value for value in held if value is not None}) > 1
        where = f"on {place}" if differ else "on every rank"
        others = "; ".join(f"{case.mesh.describe(r)}: {value}" for r, value in enumerate(held))
        message = f"{_LABELS[name]} is {held[rank]} {where} in step {step} ({_cause(case, step, planned)}); "
        message += f"expected {right}" + (": ranks differ, in training they take different steps" if differ else "")
        message += _loaded(case, step)
        yield Finding(
            "disagree" if differ else "mismatch", message, rank, place, f"{name}[{step}]", got=float(held[rank]),
            want=float(right), details=others if differ else "",
        )  # fmt: skip


def _moved_in(case: Case, step: int, planned: Planned, seen: World) -> Iterator[Finding]:
    """In a step that is to be skipped."""
    if not planned.skipped:
        return
    for rank, one in enumerate(seen):
        moved = one.facts[MOVED][step]
        if moved:
            place = case.mesh.describe(rank)
            message = f"step {step} is to be skipped ({_cause(case, step, planned)}), and it changed {some(moved)}"
            yield Finding("mismatch", f"{message} on {place}", rank, place, f"{moved[0]}[{step}]")
            return


def _loaded(case: Case, step: int) -> str:
    if not case.load or step < case.load:
        return ""
    return f"; the state was loaded{' in new processes' if case.relaunch else ''} before step {case.load}"


def _cause(case: Case, step: int, planned: Planned) -> str:
    if not planned.skipped:
        return "no gradient overflows"
    put = [one for one in case.overflows if one.step == step]
    if not put:
        return f"gradients overflow with a scale of {planned.scale:g}"
    where = [f"at {one.at} along {'-'.join(one.axes)}" if one.axes else "on all ranks" for one in put]
    return "; ".join(f"{one.value} {place}" for one, place in zip(put, where, strict=True))
