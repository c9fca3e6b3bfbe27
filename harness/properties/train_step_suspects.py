"""What values would be with each of the known mistakes of trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from harness.oracle.patterns.evidence import Suspect
from reference.train_step import TrainStepCase
from reference.train_step_expected import Changed, expected, plan

Tensors = dict[str, torch.Tensor]
Results = dict[str, torch.Tensor | None]


def suspects(case: TrainStepCase, given: Tensors, name: str) -> list[Suspect]:
    """The wrong values that known mistakes give for one of the reference's results."""
    return list(_suspects(case, given, name))


def _suspects(case: TrainStepCase, given: Tensors, name: str) -> Iterator[Suspect]:
    right = expected(case, given, plan(case)).get(name)
    for cause, compute in _mistakes(case, given):
        found = compute().get(name)
        if found is not None and right is not None and not torch.equal(found, right):
            yield Suspect(f"is as if {cause}", np.asarray(_stored(case, name, found)))


def _stored(case: TrainStepCase, name: str, values: torch.Tensor) -> torch.Tensor:
    """As the model holds them: far from the right values, rounding is beyond their tolerance."""
    beside = "[" in name or name.endswith(tuple(f".{kind}" for kind in case.kept))
    return values if beside else values.to(case.model.format.torch_dtype).to(torch.float64)


def _mistakes(case: TrainStepCase, given: Tensors) -> Iterator[tuple[str, Callable[[], Results]]]:
    plans = plan(case)

    def with_(change: Changed) -> Callable[[], Results]:
        return lambda: expected(case, given, plans, change)

    if any(one.skipped for one in plans) and case.warmup:
        counted = [replace(one, t=step) for step, one in enumerate(plans)]
        yield "steps that are skipped counted for the learning rate", lambda: expected(case, given, counted)
    if any(one.scale != 1 for one in plans):
        yield "the loss scale were not divided out", with_(Changed(scaled=1))
        yield "the loss scale were divided out twice", with_(Changed(scaled=-1))
    if case.clip:
        yield "nothing were clipped", lambda: expected(replace(case, clip=0.0), given, plans)
        if case.model.tied and case.model.stages > 1:
            yield "both copies of the tied embedding counted in the norm", with_(Changed(tied_twice=True))
    if case.steps > 1:
        yield "gradients of the step before were still there", with_(Changed(added=True))
    if case.load and case.states:
        yield f"moments began anew at step {case.load}", with_(Changed(anew=case.load))
    D = case.ranks_of_data
    if D > 1:
        yield "gradients were averaged over dp: the mean over all tokens is one already", with_(Changed(times=1 / D))
        yield "gradients were multiplied by the size of dp", with_(Changed(times=D))
