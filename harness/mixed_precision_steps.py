"""Drives a mixed-precision optimizer through the steps of a case on one rank, alike for every candidate."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from harness.candidate import NotOffered
from harness.local import Purity, WrongAdapter, WrongResult
from harness.mixed_precision import MixedPrecision
from harness.mixed_precision_reading import (
    Parameters,
    Ranges,
    Read,
    decisions,
    moved,
    named,
    number,
    numbers,
    owned,
    reading,
    unlike,
)
from harness.observation import CHANGED, REFUSED, LocalTensor, Observation
from harness.saved import (
    APART,
    GONE_ON,
    PARAMETERS,
    STATE,
    again_as,
    cut_short,
    read,
    through_a_file,
    together,
    written,
)
from harness.session import CandidateRaised, phase
from reference.mixed_precision import OF_STATE, MixedPrecisionCase
from reference.mixed_precision_steps import Tensors, handed

#: The facts of an observation: for each step what was decided, by name; for each step and parameter, the ranges that
#: the rank keeps; and for each step what has other bits than before it.
SEEN, OWNED, MOVED = "seen", "owned", "moved"
#: What a rank tells of a step that it has finished.
SKIPPED, MADE = "s", "m"

Build = Callable[[MixedPrecisionCase, Parameters], object]
Tell = Callable[[str], None]


def run(
    case: MixedPrecisionCase,
    given: Tensors,
    rank: int,
    build: Build,
    tell: Tell = lambda text: None,
    before: Observation | None = None,
) -> Observation:
    """Builds the optimizer, makes every step, and reads decisions, parameters, masters and state.

    tell: see `decided`. before: what this rank's process before this one has returned, whose steps this one carries on;
    with ``relaunch`` and without it only the steps until then are made.
    Raises WrongAdapter, WrongResult and CandidateRaised as `harness.drive.drive` does.
    """
    return _Run(case, given, rank, build, tell).all(before)


def attempt(case: MixedPrecisionCase, given: Tensors, rank: int, build: Build) -> Observation:
    """Hands over what must be refused: the fact ``refused`` is what was raised, or None."""
    one = _Run(case, given, rank, build)
    if case.invalid not in OF_STATE:
        try:
            one.built(case, one.parameters(case, wrong_dtype=case.invalid == "dtype"))
        except CandidateRaised as error:
            return Observation(facts={REFUSED: str(error).partition("\n")[0]})
        return Observation(facts={REFUSED: None})
    state = one.foreign_state()
    parameters = one.parameters(case)
    optimizer = one.built(case, parameters)
    before, decided = reading(case, parameters, optimizer), decisions(optimizer)
    try:
        with phase("load"):
            one.loader(optimizer)(state)
    except CandidateRaised as error:
        changed = moved(before, reading(case, parameters, optimizer))
        changed += [name for name, value in decisions(optimizer).items() if value != decided[name]]
        return Observation(facts={REFUSED: str(error).partition("\n")[0], CHANGED: changed})
    return Observation(facts={REFUSED: None})


def decided(seen: Sequence[Mapping[str, Any]]) -> str:
    """What a rank tells after each step, for `RankContext.tell`: a letter for each so far."""
    return "".join(SKIPPED if one["skipped"] else MADE for one in seen)


@dataclass
class _Run:
    case: MixedPrecisionCase
    given: Tensors
    rank: int
    build: Build
    tell: Tell = lambda text: None
    tensors: dict[str, LocalTensor | None] = field(default_factory=dict)
    seen: list[dict[str, Any]] = field(default_factory=list)
    owned: dict[int, dict[str, Ranges]] = field(default_factory=dict)
    moved_in: list[list[str]] = field(default_factory=list)
    gone_on: tuple[Read, dict[str, Any]] | None = None
    apart: list[str] = field(default_factory=list)

    def all(self, earlier: Observation | None = None) -> Observation:
        case, purity = self.case, Purity()
        if earlier is None:
            parameters = self.parameters(case)
            optimizer = self.built(case, parameters)
        else:
            parameters, optimizer = self._carried_on(earlier)
        parts = case.relaunch and earlier is None
        for step in range(0 if earlier is None else case.load, case.load if parts else case.steps):
            if case.load and step == case.load and earlier is None:
                parameters, optimizer = self._resumed(*self._saved(parameters, optimizer))
            if case.reload and step == case.reload:
                self._reload(parameters, optimizer)
            scale = number("scale", optimizer.scale)
            self._set_gradients(case, parameters, step, scale)
            before = reading(case, parameters, optimizer)
            with phase(f"step {step}"):
                skipped: Any = optimizer.step()
            if not isinstance(skipped, bool):
                said = reprlib.repr(skipped)
                raise WrongResult(f"step returned {said}; expected whether the step was skipped, a bool")
            self.seen.append({"by": scale, "skipped": skipped, **decisions(optimizer)})
            self.tell(decided(self.seen))
            after = reading(case, parameters, optimizer)
            self.moved_in.append(moved(before, after))
            if self.gone_on is not None and step == case.load:
                self.apart = moved(self.gone_on[0], after) + unlike(self.gone_on[1], self.seen[-1])
            self.owned[step] = {name: owned(optimizer, name, p) for name, p in parameters.items()}
            self.tensors |= named(case, self.rank, after, optimizer, step)
            self.tensors |= {} if skipped else numbers(case, optimizer, step)
        facts: dict[str, object] = {SEEN: self.seen, OWNED: self.owned, MOVED: self.moved_in, APART: self.apart}
        if parts:
            kept, file = self._saved(parameters, optimizer)
            facts |= {STATE: file, PARAMETERS: kept, GONE_ON: self.gone_on}
        return Observation(self.tensors, side_effects=together(earlier, purity), facts=facts)

    def _carried_on(self, earlier: Observation) -> tuple[Parameters, MixedPrecision]:
        facts = earlier.facts
        self.tensors, self.seen = dict(earlier.tensors), list(facts[SEEN])
        self.owned, self.moved_in = dict(facts[OWNED]), list(facts[MOVED])
        self.gone_on = facts[GONE_ON]
        self.tell(decided(self.seen))
        return self._resumed(facts[PARAMETERS], facts[STATE])

    def parameters(self, case: MixedPrecisionCase, wrong_dtype: bool = False) -> Parameters:
        """Those that this rank holds. wrong_dtype: in fp64."""
        made: Parameters = {}
        for i, one in enumerate(case.parameters):
            if case.holds(i, self.rank):
                whole = self.given.get(f"parameter{i}")
                if whole is None or whole.numel() != one.size:
                    whole = torch.zeros(one.size, dtype=torch.float64)
                dtype = torch.float64 if wrong_dtype else case.format_of(i).torch_dtype
                values = whole[case.window(i, self.rank)].to(dtype, copy=True)
                made[f"parameter{i}"] = nn.Parameter(values, requires_grad=one.kind != "frozen")
        return made

    def built(self, case: MixedPrecisionCase, parameters: Parameters) -> MixedPrecision:
        with phase("build"):
            made = self.build(case, parameters)
        if not isinstance(made, MixedPrecision):
            raise WrongAdapter(f"mixed_precision returned {reprlib.repr(made)}; expected MixedPrecision(step, scale)")
        return made

    def loader(self, optimizer: MixedPrecision) -> Callable[[Any], object]:
        if optimizer.load is None:
            raise NotOffered("the mixed-precision optimizer has no load")
        return optimizer.load

    def foreign_state(self) -> Any:
        """A state of another configuration, or one from which the last entry is missing; of other values, after so many
        steps that moments and scale have moved: what a load takes over before it refuses, shows."""
        case = self.case if self.case.invalid == "state_truncated" else self.case.other
        case = replace(case, invalid=None)
        parameters = self.parameters(case)
        with torch.no_grad():
            for parameter in parameters.values():  # a learning rate of 0 moves none
                parameter.neg_().add_(0.5)
        optimizer = self.built(case, parameters)
        for step in range(case.scaling.growth_interval if case.scaling.kind == "dynamic" else 1):
            # The sum over all ranks is within the range of fp16.
            value = number("scale", optimizer.scale) / case.mesh.size
            for parameter in parameters.values():
                if parameter.requires_grad and case.main_grad:
                    parameter.main_grad = torch.full(parameter.shape, value)  # type: ignore[attr-defined]
                elif parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, value)
            with phase(f"step {step}"):
                optimizer.step()
        state = through_a_file(self._saver(optimizer))
        return cut_short(state) if self.case.invalid == "state_truncated" else state

    def _saver(self, optimizer: MixedPrecision) -> Callable[[], object]:
        if optimizer.save is None:
            raise NotOffered("the mixed-precision optimizer has no save")
        return optimizer.save

    def _saved(self, parameters: Parameters, optimizer: MixedPrecision) -> tuple[Parameters, bytes]:
        """The parameters and the file of the state, with which others are to go on. Who saved makes the next step
        first: what saving has changed shows then, and what the state lacks."""
        case, step = self.case, self.case.load
        file, kept = written(self._saver(optimizer)), again_as(parameters)
        if case.reload == step:
            self._reload(parameters, optimizer)
        self._set_gradients(case, parameters, step, number("scale", optimizer.scale))
        with phase(f"step {step} of the optimizer that saved, and goes on"):
            skipped = optimizer.step()
        self.gone_on = reading(case, parameters, optimizer), {"skipped": skipped, **decisions(optimizer)}
        return kept, file

    def _resumed(self, parameters: Mapping[str, torch.Tensor], file: bytes) -> tuple[Parameters, MixedPrecision]:
        """A new optimizer with the state of the old one, for new parameters of the same values."""
        again = again_as(parameters)
        made = self.built(self.case, again)
        state = read(file)
        with phase("load"):
            self.loader(made)(state)
        return again, made

    def _reload(self, parameters: Parameters, optimizer: MixedPrecision) -> None:
        if optimizer.reload is None:
            raise NotOffered("the mixed-precision optimizer has no reload")
        for name, parameter in parameters.items():
            i = int(name.removeprefix("parameter"))
            with torch.no_grad():
                parameter.copy_(self.given[f"reloaded{i}"][self.case.window(i, self.rank)])
        with phase("reload"):
            optimizer.reload()

    def _set_gradients(self, case: MixedPrecisionCase, parameters: Parameters, step: int, scale: float) -> None:
        coordinate = case.mesh.coordinate(self.rank, "dp")
        for name, parameter in parameters.items():
            i = int(name.removeprefix("parameter"))
            if case.parameters[i].kind == "frozen":
                continue
            has = case.has_gradient(i, coordinate, step)
            gradient = handed(case, self.given, i, step, self.rank, scale) if has else None
            if case.main_grad:
                parameter.main_grad = gradient  # type: ignore[attr-defined]
            else:
                parameter.grad = gradient
