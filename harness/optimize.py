"""Drives a sharded optimizer through the steps of a case on one rank, alike for every candidate."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from harness.candidate import NotOffered
from harness.local import Purity, WrongAdapter, local_tensor, require_like
from harness.observation import CHANGED, REFUSED, LocalTensor, Observation, Sent
from harness.oracle.compare import same_bits
from harness.saved import APART, GONE_ON, PARAMETERS, STATE, again_as, read, through_a_file, together, written
from harness.session import CandidateRaised, phase
from harness.sharded_optimizer import ShardedOptimizer
from harness.world.traffic import Recorder
from reference.sharded_optimizer import OF_STATE, ShardedOptimizerCase, Tensors, local_gradients

#: The facts of an observation: for each step and parameter, the ranges that the rank owns.
OWNED = "owned"

Ranges = tuple[tuple[int, int], ...]
Parameters = dict[str, nn.Parameter]
Build = Callable[[ShardedOptimizerCase, Parameters], object]


def optimize(
    case: ShardedOptimizerCase,
    given: Tensors,
    rank: int,
    build: Build,
    traffic: Recorder | None = None,
    before: Observation | None = None,
) -> Observation:
    """Builds the optimizer, makes every step, and reads parameters and state.

    before: what this rank's process before this one has returned, whose steps this one carries on; with ``relaunch``
    and without it only the steps until then are made.
    Raises WrongAdapter, WrongResult and CandidateRaised as `harness.drive.drive` does.
    """
    return _Run(case, given, rank, build, traffic).all(before)


def attempt(case: ShardedOptimizerCase, given: Tensors, rank: int, build: Build) -> Observation:
    """Hands over what must be refused: the fact ``refused`` is what was raised, or None."""
    run = _Run(case, given, rank, build)
    state = run.foreign_state() if case.invalid in OF_STATE else None
    try:
        if state is None:
            run.all()
            return Observation(facts={REFUSED: None})
    except CandidateRaised as error:
        return Observation(facts={REFUSED: str(error).partition("\n")[0]})
    parameters = run.parameters()
    optimizer = run.stepped(case, parameters)  # some have no state before a step
    before = run.reading(parameters, optimizer)
    try:
        with phase("load"):
            run.loader(optimizer)(state)
    except CandidateRaised as error:
        now = run.reading(parameters, optimizer)
        changed = [name for name, values in before.items() if not np.array_equal(values, now[name], equal_nan=True)]
        return Observation(facts={REFUSED: str(error).partition("\n")[0], CHANGED: changed})
    return Observation(facts={REFUSED: None})


@dataclass
class _Run:
    case: ShardedOptimizerCase
    given: Tensors
    rank: int
    build: Build
    traffic: Recorder | None = None
    sent: list[Sent] = field(default_factory=list)
    tensors: dict[str, LocalTensor | None] = field(default_factory=dict)
    owned: dict[int, dict[str, Ranges]] = field(default_factory=dict)
    gone_on: dict[str, LocalTensor | None] = field(default_factory=dict)
    apart: list[str] = field(default_factory=list)

    def all(self, before: Observation | None = None) -> Observation:
        case, purity = self.case, Purity()
        if before is None:
            parameters = self.parameters()
            optimizer = self.built(case, self._spoiled(parameters))
        else:
            parameters, optimizer = self._carried_on(before)
        parts = case.relaunch and before is None and not case.invalid
        for step in range(0 if before is None else case.load, case.load if parts else case.steps):
            if case.load and step == case.load and before is None:
                parameters, optimizer = self._resumed(*self._saved(parameters, optimizer))
            self._set_gradients(parameters, step)
            sent_before = self._sent_so_far()
            with phase(f"step {step}"):
                optimizer.step()
            if self.traffic is not None:
                self.sent += [Sent("finish", step, one) for one in self.traffic.records()[sent_before:]]
            self._read(parameters, optimizer, step)
            if step == case.load:
                self.apart = [name for name, one in self.gone_on.items() if not _same(one, self.tensors[name])]
        sent = None if self.traffic is None else tuple(self.sent)
        facts: dict[str, object] = {OWNED: self.owned, APART: self.apart}
        if parts:
            kept, file = self._saved(parameters, optimizer)
            facts |= {STATE: file, PARAMETERS: kept, GONE_ON: self.gone_on}
        return Observation(self.tensors, side_effects=together(before, purity), sent=sent, facts=facts)

    def _carried_on(self, before: Observation) -> tuple[Parameters, ShardedOptimizer]:
        self.tensors, self.sent, self.owned = dict(before.tensors), list(before.sent or ()), dict(before.facts[OWNED])
        self.gone_on = before.facts[GONE_ON]
        return self._resumed(before.facts[PARAMETERS], before.facts[STATE])

    def parameters(self) -> Parameters:
        made: Parameters = {}
        for i, one in enumerate(self.case.parameters):
            values = self.given[f"parameter{i}"].to(self.case.format_of(i).torch_dtype)
            made[f"parameter{i}"] = nn.Parameter(values.clone(), requires_grad=one.kind != "frozen")
        return made

    def built(self, case: ShardedOptimizerCase, parameters: Parameters) -> ShardedOptimizer:
        with phase("build"):
            made = self.build(case, parameters)
        if not isinstance(made, ShardedOptimizer):
            raise WrongAdapter(f"sharded_optimizer returned {reprlib.repr(made)}; expected ShardedOptimizer(step)")
        return made

    def loader(self, optimizer: ShardedOptimizer) -> Callable[[Any], object]:
        if optimizer.load is None:
            raise NotOffered("the sharded optimizer has no load")
        return optimizer.load

    def foreign_state(self) -> Any:
        """The state of other parameters, or of another optimizer, after a step that moves all of it: what a load takes
        over before it refuses, shows."""
        case, parameters = self.case, self.parameters()
        if case.invalid == "state_optimizer":
            case = replace(case, optimizer="sgd" if case.optimizer == "adamw" else "adamw", momentum=0.0, invalid=None)
        else:
            parameters = _changed(parameters, case, str(case.invalid).removeprefix("state_"))
        return through_a_file(self._saver(self.stepped(case, parameters, 1.0)))

    def stepped(self, case: ShardedOptimizerCase, parameters: Parameters, gradient: float = 0.0) -> ShardedOptimizer:
        """An optimizer after a step in which all elements of gradients are alike."""
        optimizer = self.built(case, parameters)
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, gradient) if parameter.requires_grad else None
        with phase("step 0"):
            optimizer.step()
        return optimizer

    def reading(self, parameters: Parameters, optimizer: ShardedOptimizer) -> dict[str, Any]:
        """The values of parameters and state, by name."""
        self._read(parameters, optimizer, 0)
        return {name.partition("[")[0]: held.values for name, held in self.tensors.items() if held is not None}

    def _spoiled(self, parameters: Parameters) -> Parameters:
        """What is handed over: in a case that must be refused, not what there is."""
        case = self.case
        if case.invalid == "empty":
            return {}
        last = case.mesh.coordinate(self.rank, case.axis) == case.parallel_size - 1
        return parameters if case.invalid is None or not last else _changed(parameters, case, case.invalid)

    def _saved(self, parameters: Parameters, optimizer: ShardedOptimizer) -> tuple[Parameters, bytes]:
        """The parameters and the file of the state, with which others are to go on. Where these are as many, who saved
        makes the next step first: what saving has changed shows then, and what the state lacks."""
        file, kept, step = written(self._saver(optimizer)), again_as(parameters), self.case.load
        if self.case.load_axis is None:
            self._set_gradients(parameters, step)
            with phase(f"step {step} of the optimizer that saved, and goes on"):
                optimizer.step()
            other = replace(self, tensors={}, owned={})
            other._read(parameters, optimizer, step)
            self.gone_on = other.tensors
        return kept, file

    def _resumed(self, parameters: Mapping[str, torch.Tensor], file: bytes) -> tuple[Parameters, ShardedOptimizer]:
        """A new optimizer with the state of the old one, for new parameters of the same values."""
        again = again_as(parameters)
        made = self.built(replace(self.case, axis=self.case.axis_at(self.case.load), load_axis=None), again)
        state = read(file)
        with phase("load"):
            self.loader(made)(state)
        return again, made

    def _saver(self, optimizer: ShardedOptimizer) -> Callable[[], object]:
        if optimizer.save is None:
            raise NotOffered("the sharded optimizer has no save")
        return optimizer.save

    def _set_gradients(self, parameters: Parameters, step: int) -> None:
        case = self.case
        replica = case.mesh.coordinate(self.rank, case.apart) if case.apart else 0
        coordinate = case.mesh.coordinate(self.rank, case.axis_at(step))
        for i in case.trained:
            parameter = parameters[f"parameter{i}"]
            own = local_gradients(case, self.given, i, step)[replica, coordinate].to(parameter.dtype)
            parameter.grad = own.clone() if case.has_gradient(i, coordinate, step) else None

    def _sent_so_far(self) -> int:
        return 0 if self.traffic is None else len(self.traffic.records())

    def _read(self, parameters: Parameters, optimizer: ShardedOptimizer, step: int) -> None:
        for i, one in enumerate(self.case.parameters):
            name = f"parameter{i}"
            what = f"{name}[{step}]"
            with phase(f"reading {what}"):
                found = parameters[name].detach()
            require_like(what, found, one.shape, self.case.format_of(i).torch_dtype)
            self.tensors[what] = local_tensor(what, found)
            if one.kind != "frozen" and optimizer.owned is not None:
                with phase(f"owned({name!r})"):
                    said: Any = optimizer.owned(name)
                ranges = _ranges(name, said)
                self.owned.setdefault(step, {})[name] = ranges
                self._read_state(optimizer, i, step, sum(max(0, stop - start) for start, stop in ranges))

    def _read_state(self, optimizer: ShardedOptimizer, i: int, step: int, elements: int) -> None:
        if optimizer.state is None:
            return
        for kind in self.case.states:
            what = f"{kind}{i}[{step}]"
            with phase(f"state(parameter{i}, {kind})"):
                found = optimizer.state(f"parameter{i}", kind)
            require_like(f"{what} of the elements owned", found, (elements,), self.case.kept(i).torch_dtype)
            self.tensors[what] = local_tensor(what, found)


def _same(one: LocalTensor | None, other: LocalTensor | None) -> bool:
    values = [None if held is None else held.values for held in (one, other)]
    if values[0] is None or values[1] is None:
        return values[0] is values[1]
    return values[0].shape == values[1].shape and same_bits(values[0], values[1])


def _ranges(name: str, said: Any) -> Ranges:
    try:
        return tuple((int(start), int(stop)) for start, stop in said)
    except (TypeError, ValueError):
        raise WrongAdapter(
            f"owned({name!r}) returned {reprlib.repr(said)}; expected a list of ranges (start, stop) of its elements, "
            "an empty one where the rank keeps none"
        ) from None


def _changed(parameters: Parameters, case: ShardedOptimizerCase, what: str) -> Parameters:
    """Parameters that are not those of the case, in one way."""
    name = f"parameter{case.trained[0]}"
    first = parameters[name]
    if what == "number":
        return {**parameters, "another": nn.Parameter(torch.zeros(1, dtype=first.dtype))}
    if what == "order":
        return dict(reversed(parameters.items()))
    if what == "shape":
        return {
            **parameters,
            name: nn.Parameter(torch.zeros(*case.parameters[case.trained[0]].shape, 2, dtype=first.dtype)),
        }
    other = torch.float32 if first.dtype == torch.float64 else torch.float64
    return {**parameters, name: nn.Parameter(first.detach().to(other))}
