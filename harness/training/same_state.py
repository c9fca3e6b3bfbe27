"""One step again, on one process, from all that the ranks had before it.

Rounding grows from step to step, and after many of them it may explain anything. From the same state it is that of one
step, and everything that the ranks keep after it is compared, element by element.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from harness.bench import is_close
from harness.observation import Observation
from harness.oracle.statistics import Expected
from harness.oracle.within import Limits
from harness.properties.modules import explanation, wanted
from harness.properties.tensors import judge_tensors
from harness.properties.train_step import forms_of
from harness.properties.train_step_kept import joined, judge_masters
from harness.training.curves import Look
from harness.training.judging import number_of
from harness.verdict import Finding
from reference.gpt_parameters import OUTPUT, shapes
from reference.layout import window
from reference.mixed_precision_steps import Planned
from reference.train_step import TrainStepCase
from reference.train_step_expected import Model

World = Sequence[Observation]
Tensors = dict[str, torch.Tensor]


def offered(case: TrainStepCase, before: World) -> bool:
    """Whether the ranks show all that they keep."""
    return all(f"{name}.{kind}" in before[0].tensors for name in _names(case) for kind in case.kept)


def look(case: TrainStepCase, step: int, planned: Planned, before: World, after: World) -> tuple[Look, list[Finding]]:
    """A step that was not skipped, and what is wrong with it. planned: what was decided in it."""
    whole, ownership = joined(case, before)
    if ownership is not None:
        return Look(step, np.inf), [ownership]
    names = _names(case)
    given = {what: _global(case, whole, what, name) for name in names for what in _kept(case, name)}

    def compute() -> dict[str, torch.Tensor | None]:
        masters = {name: given[f"{name}.master" if case.dtype != "fp32" else name] for name in names}
        states = {name: {kind: given[f"{name}.{kind}"] for kind in case.states} for name in names}
        model = Model.of(case, {name: given[name] for name in names})
        model.masters, model.states = masters, states
        gradients, loss = model.gradients(step, planned.scale)
        made = model.step(gradients, planned)
        found: dict[str, torch.Tensor | None] = {f"loss[{step}]": loss}
        found |= {f"{name}[{step}]": value for name, value in made.items()}
        for name in names:
            kept = {name: model.values[name], f"{name}.master": model.masters[name]}
            kept |= {f"{name}.{kind}": values for kind, values in model.states[name].items()}
            found |= {what: kept[what].clone() for what in _kept(case, name)}
        return found

    seen, ownership = joined(case, after)
    if ownership is not None:
        return Look(step, np.inf), [ownership]
    shown = {name for one in seen for name in one.tensors}
    forms = forms_of(case, seen[0])
    why = explanation(forms, case.mesh, seen, {}, case.model.micro_batches)
    for careful in (False, True):
        found = wanted(False, case.model.format, compute, given, careful=careful)
        want = {name: one for name, one in found.items() if name in shown}
        verdict = judge_tensors(want, forms, case.mesh, seen, why)
        if not is_close(verdict):
            break
    share = max(verdict.facts["worst"] / Limits().worst, verdict.facts["slope"] / Limits().slope)
    of_loss = want[f"loss[{step}]"]
    assert isinstance(of_loss, Expected)
    loss, _ = number_of(case, f"loss[{step}]", of_loss, seen)
    return Look(step, share, loss), [*verdict.findings, *judge_masters(case, seen)]


def _names(case: TrainStepCase) -> list[str]:
    """The parameters, but for a tied output."""
    return [name for name in shapes(case.model) if not (case.model.tied and name == OUTPUT)]


def _kept(case: TrainStepCase, name: str) -> tuple[str, ...]:
    return (name, *(f"{name}.{kind}" for kind in case.kept))


def _global(case: TrainStepCase, seen: World, what: str, name: str) -> torch.Tensor:
    """A tensor of all ranks, put together."""
    shape = shapes(case.model)[name]
    made = np.full(shape, np.nan)
    for rank, one in enumerate(seen):
        held = one.tensors[what]
        assert held is not None
        assert held.values is not None
        part = window(shape, one.layouts[name], case.mesh, rank)
        made[tuple(slice(start, start + length) for start, length in part.ranges)] = held.values
    return torch.from_numpy(made)
