"""Drives a loss scaler through the events of a case on one rank, alike for every candidate."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from harness.candidate import NotOffered
from harness.local import Purity, WrongAdapter, WrongResult
from harness.loss_scale import LossScaler
from harness.mixed_precision_reading import counted, number
from harness.observation import CHANGED, REFUSED, Observation, Sent
from harness.saved import STATE, alike, cut_short, read, together, written
from harness.session import CandidateRaised, phase
from harness.world.traffic import Recorder
from reference.dtypes import format_of
from reference.loss_scale import OF_STATE, Event, LossScaleCase

#: The fact of an observation: after each event what was seen, by name.
SEEN = "seen"
#: Events that load a state.
_LOADS = ("load", "fresh", "relaunch")

Build = Callable[[LossScaleCase], object]
Seen = dict[str, Any]


def run(
    case: LossScaleCase,
    rank: int,
    build: Build,
    traffic: Recorder | None = None,
    before: Observation | None = None,
) -> Observation:
    """Builds the scaler, has it go through all events, and reads scale, counters and decisions after each.

    before: what this rank's process before this one has returned, which this one carries on; where one is to, without
    it, only the events until then are gone through, and the state that was saved last is the fact ``state``.
    Raises WrongAdapter, WrongResult and CandidateRaised as `harness.drive.drive` does.
    """
    purity, one = Purity(), _Run(case, rank, build, traffic)
    if before is None:
        one.begin()
        one.go(0, case.relaunched)
    else:
        one.carry_on(before)
    sent = None if traffic is None else tuple(one.sent)
    return Observation(side_effects=together(before, purity), sent=sent, facts={SEEN: one.seen, STATE: one.saved})


def attempt(case: LossScaleCase, rank: int, build: Build) -> Observation:
    """Hands over what must be refused: the fact ``refused`` is what was raised, or None."""
    one = _Run(case, rank, build)
    if case.invalid not in OF_STATE:
        try:
            one.begin()
            one.go()
        except CandidateRaised as error:
            return Observation(facts={REFUSED: str(error).partition("\n")[0]})
        return Observation(facts={REFUSED: None})
    one.begin()
    one.go()
    state, before = one.foreign_state(), one.all_that_it_keeps()
    try:
        with phase("load"):
            one.loader()(state)
    except CandidateRaised as error:
        now = one.all_that_it_keeps()
        changed = [name for name, value in now.items() if not alike(value, before[name])]
        return Observation(facts={REFUSED: str(error).partition("\n")[0], CHANGED: changed})
    return Observation(facts={REFUSED: None})


@dataclass
class _Run:
    case: LossScaleCase
    rank: int
    build: Build
    traffic: Recorder | None = None
    sent: list[Sent] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    saved: bytes = b""

    def begin(self) -> None:
        self.scaler = self.built(self.case)
        if any(event.what in _LOADS for event in self.case.events):
            self.saved = self.state_of(self.scaler)  # what is loaded before anything is saved

    def carry_on(self, before: Observation) -> None:
        """From the event on with which another process goes on."""
        self.seen, self.sent, self.saved = list(before.facts[SEEN]), list(before.sent or ()), before.facts[STATE]
        self.go(len(self.seen))

    def go(self, start: int = 0, stop: int | None = None) -> None:
        """Through these events."""
        for at, event in list(enumerate(self.case.events))[start:stop]:
            before = len(self.traffic.records()) if self.traffic is not None else 0
            step = self.step(event, at) if event.is_step else self.change(event, at)
            if self.traffic is not None:
                self.sent += [Sent("finish", at, one) for one in self.traffic.records()[before:]]
            self.seen.append({**step, **self.reading()})

    def built(self, case: LossScaleCase, where: str = "") -> LossScaler:
        with phase(f"build{where}"):
            made = self.build(case)
        if not isinstance(made, LossScaler):
            raise WrongAdapter(f"loss_scaler returned {reprlib.repr(made)}; expected LossScaler(scale, update)")
        return made

    def step(self, event: Event, at: int) -> Seen:
        hit, seen = event.hits(self.case.mesh, self.rank), Seen()
        if self.scaler.check is not None:
            gradients = self.gradients(event, at)
            copies = [gradient.clone() for gradient in gradients]
            with phase(f"check of event {at}"):
                seen["found"] = hit = bool(self.scaler.check(gradients))
            if not all(torch.equal(*pair) for pair in zip(map(_bits, gradients), map(_bits, copies), strict=True)):
                raise WrongResult(f"check of event {at} changed the gradients; expected it to look at them alone")
        with phase(f"update of event {at}"):
            skipped = self.scaler.update(hit)
        if not isinstance(skipped, bool):
            raise WrongResult(f"update returned {reprlib.repr(skipped)}; expected whether the step is skipped, a bool")
        return {**seen, "skipped": skipped}

    def gradients(self, event: Event, at: int) -> list[torch.Tensor]:
        """Sums and squares of their elements overflow, though no element does; and there is one without elements."""
        dtype = format_of(self.case.gradients).torch_dtype
        made = [torch.ones(2, dtype=dtype), torch.full((3,), torch.finfo(dtype).max, dtype=dtype)]
        if event.hits(self.case.mesh, self.rank):
            made[at % 2][at % 2] = float(event.value)
        return [*made, torch.empty(0, dtype=dtype)]

    def change(self, event: Event, at: int) -> Seen:
        where = f" of event {at}" + (", in new processes" if at == self.case.relaunched else "")
        if event.what == "save":
            self.saved = self.state_of(self.scaler)
        elif event.what == "interval":
            if self.scaler.set_interval is None:
                raise NotOffered("the loss scaler has no set_interval")
            with phase(f"set_interval{where}"):
                self.scaler.set_interval(event.interval)
        else:
            if event.what != "load":
                self.scaler = self.built(self.case, where)
            saved = read(self.saved)
            with phase(f"load{where}"):
                self.loader()(saved)
        return {}

    def reading(self) -> Seen:
        """The scale, and the counters that the candidate declares."""
        found: Seen = {"scale": number("scale", self.scaler.scale)}
        return found if self.scaler.counters is None else found | counted(self.scaler.counters)

    def state_of(self, scaler: LossScaler) -> bytes:
        """A file of the state."""
        if scaler.state is None:
            raise NotOffered("the loss scaler has no state")
        return written(scaler.state)

    def all_that_it_keeps(self) -> Seen:
        """What is read, and the state as it is saved, which has more."""
        return {**self.reading(), "state": read(self.state_of(self.scaler))}

    def loader(self) -> Callable[[Any], object]:
        if self.scaler.load is None:
            raise NotOffered("the loss scaler has no load")
        return self.scaler.load

    def foreign_state(self) -> Any:
        """A state of another configuration, or one from which the last entry is missing; of a scaler that has moved:
        what a load takes over before it refuses, shows."""
        truncated = self.case.invalid == "state_truncated"
        scaling = self.case.scaling if truncated else self.case.other
        scaler = self.built(replace(self.case, scaling=scaling, invalid=None, events=()))
        with phase("update"):
            for found in (*(True,) * max(1, scaling.hysteresis), False):
                scaler.update(found)
        state = read(self.state_of(scaler))
        return cut_short(state) if truncated else state


def _bits(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.view(torch.int32 if gradient.element_size() == 4 else torch.int16)
