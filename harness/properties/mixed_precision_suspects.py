"""What values would be with each of the known mistakes of mixed-precision optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from harness.oracle.patterns.evidence import Suspect
from reference.mixed_precision import MixedPrecisionCase
from reference.mixed_precision_steps import Changed, Planned, Tensors, expected

Results = dict[str, torch.Tensor | None]


def suspects(case: MixedPrecisionCase, given: Tensors, plans: Sequence[Planned], name: str) -> list[Suspect]:
    """The wrong values that known mistakes give for one of the reference's results."""
    return list(_suspects(case, given, plans, name))


def _suspects(case: MixedPrecisionCase, given: Tensors, plans: Sequence[Planned], name: str) -> Iterator[Suspect]:
    right = expected(case, given, plans).get(name)
    for cause, compute in _mistakes(case, given, plans):
        found = compute().get(name)
        if found is not None and right is not None and not torch.equal(found, right):
            yield Suspect(f"is as if {cause}", np.asarray(_stored(case, name, found)))


def _stored(case: MixedPrecisionCase, name: str, values: torch.Tensor) -> torch.Tensor:
    """As the model holds them: far from the right values, rounding is beyond their tolerance."""
    if not name.startswith("parameter"):
        return values
    i = int(name.removeprefix("parameter").partition("[")[0].removesuffix(".copy"))
    return values.to(case.format_of(i).torch_dtype).to(torch.float64)


def _mistakes(
    case: MixedPrecisionCase, given: Tensors, plans: Sequence[Planned]
) -> Iterator[tuple[str, Callable[[], Results]]]:
    def with_(**change: Any) -> Callable[[], Results]:
        return lambda: expected(case, given, plans, Changed(**change))

    if any(one.skipped for one in plans):
        rate, moments = "for the learning rate", "where Adam's moments are corrected for their start"
        if case.warmup:
            yield f"steps that are skipped counted {rate}", with_(rate_counts=True)
        if case.optimizer == "adamw":
            yield f"steps that are skipped counted {moments}", with_(moments_count=True)
        if case.warmup and case.optimizer == "adamw":
            yield f"steps that are skipped counted {rate} and {moments}", with_(rate_counts=True, moments_count=True)
        if case.states:
            yield f"{' and '.join(case.states)} decayed in steps that are skipped", with_(decays=True)
    if any(map(case.has_master, range(len(case.parameters)))):
        for when in ("before", "after"):
            yield "masters were made anew from the rounded model in each step", with_(remade=when)
    if any(one.scale != 1 for one in plans):
        yield "the loss scale were not divided out", lambda: expected(case, _scaled(given, plans, 1), plans)
        yield "the loss scale were divided out twice", lambda: expected(case, _scaled(given, plans, -1), plans)
    if case.reload:
        yield "masters were not refreshed after the weights were loaded", lambda: expected(
            replace(case, reload=0), given, plans)  # fmt: skip
    if case.clip:
        yield "nothing were clipped", lambda: expected(replace(case, clip=0.0), given, plans)
        yield "gradients within the limit were scaled up to it", with_(unlimited=True)
        if any(one.scale != 1 for one in plans):
            yield "gradients were clipped before the loss scale was divided out", with_(norm_scaled=True)
    if case.replicas > 1:
        yield "gradients were summed and not averaged", lambda: expected(case, _times(given, case.replicas), plans)
        yield "gradients were averaged twice", lambda: expected(case, _times(given, 1 / case.replicas), plans)
        for at in range(case.replicas):
            yield f"gradients were those of dp={at} alone", lambda at=at: expected(  # type: ignore[misc]
                case, _alone(given, at), plans)  # fmt: skip
    if len(case.groups) > 1:
        yield "all parameters were of the first group", lambda: expected(
            replace(case, groups=case.groups[:1]), given, plans)  # fmt: skip
    if any(one.weight_decay for one in case.groups):
        plain = tuple(replace(one, weight_decay=0.0) for one in case.groups)
        yield "there were no weight decay", lambda: expected(replace(case, groups=plain), given, plans)


def _is_gradient(name: str) -> bool:
    return name.startswith("gradient")


def _times(given: Tensors, by: float) -> Tensors:
    return {name: values * by if _is_gradient(name) else values for name, values in given.items()}


def _scaled(given: Tensors, plans: Sequence[Planned], times: int) -> Tensors:
    """Every gradient multiplied by its scale so many times."""
    made = dict(given)
    for name in filter(_is_gradient, given):
        step = int(name.partition("[")[2].removesuffix("]"))
        made[name] = given[name] * plans[step].scale ** times
    return made


def _alone(given: Tensors, at: int) -> Tensors:
    return {
        name: values[at].expand(values.shape[0], -1) if _is_gradient(name) else values for name, values in given.items()
    }
