"""Drives the clipping of gradients on one rank, alike for every candidate."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from harness.clip import Clipper
from harness.local import Purity, WrongAdapter, WrongResult, as_number, local_tensor, require_like
from harness.observation import CHANGED, REFUSED, LocalTensor, Observation
from harness.session import CandidateRaised, phase
from reference.clip import ClipCase, Tensors, held, local, names

#: The fact of an observation: whether the step is to be skipped.
SKIPS = "skips"

Parameters = dict[str, nn.Parameter]
Build = Callable[[ClipCase, Parameters], object]


def run(case: ClipCase, given: Tensors, rank: int, build: Build) -> Observation:
    """Hands over the parameters of this rank with their gradients, has them clipped, and reads what came of them.

    Raises WrongAdapter, WrongResult and CandidateRaised as `harness.drive.drive` does.
    """
    purity, parameters = Purity(), _parameters(case, given, rank)
    clipper = _built(case, parameters, build)
    with phase("clip"):
        norm = clipper.clip()
    found: dict[str, LocalTensor | None] = {"norm": _number("the norm", norm)}
    if clipper.coefficient is not None:
        with phase("coefficient"):
            found["coefficient"] = _number("the coefficient", clipper.coefficient())
    facts = {}
    if clipper.skips is not None:
        with phase("skips"):
            said: Any = clipper.skips()
        if not isinstance(said, bool):
            raise WrongResult(f"skips returned {reprlib.repr(said)}; expected whether the step is skipped, a bool")
        facts[SKIPS] = said
    for i in range(len(case.parameters)):
        own, like = held(case, i, rank), local(case, given, i, rank).to(case.format.torch_dtype)
        for name in names(case, i):
            if name != own:
                found[name] = local_tensor(name, like[:0])
            else:
                found[name] = _gradient(clipper, parameters, i, like)
    return Observation(found, side_effects=tuple(purity.report()), facts=facts)


def attempt(case: ClipCase, given: Tensors, rank: int, build: Build) -> Observation:
    """Hands over what must be refused: the fact ``refused`` is what was raised, or None."""
    parameters = _parameters(case, given, rank)
    before = {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()}
    try:
        clipper = _built(case, parameters, build)
        with phase("clip"):
            clipper.clip()
    except CandidateRaised as error:
        changed = [name for name, p in parameters.items() if not _alike(p.grad, before[name])]
        return Observation(facts={REFUSED: str(error).partition("\n")[0], CHANGED: changed})
    return Observation(facts={REFUSED: None})


def _parameters(case: ClipCase, given: Tensors, rank: int) -> Parameters:
    made: Parameters = {}
    for i, one in enumerate(case.parameters):
        if held(case, i, rank) is None:
            continue
        values = local(case, given, i, rank).to(case.format.torch_dtype)
        parameter = nn.Parameter(torch.zeros_like(values), requires_grad=one.kind != "frozen")
        parameter.grad = None if case.is_without(i, rank) else values
        made[f"parameter{i}"] = parameter
    return made


def _built(case: ClipCase, parameters: Parameters, build: Build) -> Clipper:
    with phase("build"):
        made = build(case, parameters)
    if not isinstance(made, Clipper):
        raise WrongAdapter(f"clip_gradients returned {reprlib.repr(made)}; expected Clipper(clip)")
    return made


def _number(what: str, found: Any) -> LocalTensor:
    return local_tensor(what, torch.tensor([as_number(what, found)], dtype=torch.float64))


def _gradient(clipper: Clipper, parameters: Parameters, i: int, like: torch.Tensor) -> LocalTensor:
    """None stands for zeros."""
    name = f"parameter{i}"
    with phase(f"reading the gradient of {name}"):
        found = clipper.gradient(name) if clipper.gradient is not None else parameters[name].grad
    if found is None:
        return local_tensor(name, torch.zeros_like(like))
    require_like(f"the gradient of {name}", found, tuple(like.shape), like.dtype)
    return local_tensor(name, found)


def _alike(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
