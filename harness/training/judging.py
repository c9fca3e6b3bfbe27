"""Steps of ranks against those of one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from harness.mixed_precision_steps import MOVED, SEEN
from harness.observation import Observation
from harness.oracle.statistics import Expected
from harness.oracle.within import Limits
from harness.properties.gpt import loss_cut
from harness.properties.mixed_precision_decisions import judge_decisions
from harness.properties.modules import explanation
from harness.properties.tensors import Form, judge_tensors
from harness.training import beside
from harness.training.curves import Number, Step
from harness.verdict import Finding
from reference.layout import Whole
from reference.train_step import TrainStepCase

World = Sequence[Observation]


def judged(case: TrainStepCase, due: beside.Step, step: int, at: int, seen: World) -> tuple[Step, list[Finding]]:
    """A step, and what is wrong with it. at: its place in what was seen."""
    said = [{SEEN: [one.facts[SEEN][at]], MOVED: [one.facts[MOVED][at]]} for one in seen]
    decisions = [replace(one, facts=facts) for one, facts in zip(seen, said, strict=True)]
    numbered = replace(case, steps=1, overflows=())
    findings = [_at(step, one) for one in judge_decisions(numbered, [due.planned], decisions)]
    numbers: dict[str, Number | None] = {}
    for name, value in due.values.items():
        numbers[name], wrong = number_of(case, name, value, seen)
        findings += wrong
    loss = numbers[f"loss[{step}]"]
    if loss is None:  # no rank has it, which is a finding
        loss = Number(np.nan, float(due.values[f"loss[{step}]"].want[0]), 0.0, np.inf)
    first = seen[0].facts[SEEN][at]
    made = Step(
        step, loss, numbers.get(f"norm[{step}]"), first["by"], first["skipped"], due.planned.scale,
        due.planned.skipped, due.decided,
    )  # fmt: skip
    return made, findings


def _at(step: int, finding: Finding) -> Finding:
    """The finding with the number of the step, which was judged as the only one."""
    message = finding.message.replace("step 0", f"step {step}")
    tensor = finding.tensor and finding.tensor.replace("[0]", f"[{step}]")
    return replace(finding, message=message, tensor=tensor)


def number_of(case: TrainStepCase, name: str, want: Expected, seen: World) -> tuple[Number | None, list[Finding]]:
    """A loss, or another number of a step, and what is wrong with it; None where no rank has it."""
    is_loss = name.startswith("loss")
    layout = loss_cut(case.model)["loss"] if is_loss else Whole()
    form = Form(layout, "float32" if is_loss else "float64")
    if not is_loss and not any(name in one.tensors for one in seen):
        return None, []  # not offered, or the ranks skipped the step
    why = explanation({name: form}, case.mesh, seen, {}, case.model.micro_batches)
    verdict = judge_tensors({name: want}, {name: form}, case.mesh, seen, why)
    share = max(verdict.facts["worst"] / Limits().worst, verdict.facts["slope"] / Limits().slope)
    got = next((v for v in _values(name, seen) if v.size), None)
    if got is None:
        return None, list(verdict.findings)
    return Number(float(got[0]), float(want.want[0]), tolerance_of(want), share), list(verdict.findings)


def _values(name: str, seen: World) -> Iterator[np.ndarray]:
    for one in seen:
        held = one.tensors.get(name)
        if held is not None and held.values is not None:
            yield held.values


def tolerance_of(want: Expected) -> float:
    """By how much a single number may differ: what both statistics allow."""
    if want.ambiguous.any():
        return np.inf
    runs = float(np.sqrt(np.mean(np.square(want.residuals))))
    return min(Limits().worst * float(want.tolerance[0]), Limits().slope * runs)


def agreed(step: int, at: int, seen: World) -> bool:
    """Whether the ranks skipped a step: where they differ, what the first one did."""
    skipped: bool = seen[0].facts[SEEN][at]["skipped"]
    return skipped


def side_effects(case: TrainStepCase, seen: World) -> Iterator[Finding]:
    found: Mapping[str, int] = {
        what: rank for rank, one in reversed(list(enumerate(seen))) for what in one.side_effects
    }
    for what, rank in found.items():
        yield Finding("side-effect", f"the candidate {what}", rank, case.mesh.describe(rank))
