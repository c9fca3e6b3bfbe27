"""Drives a loss scaler through the events of a case on one rank, alike for every candidate."""

from __future__ import annotations

import io
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from harness.candidate import NotOffered
from harness.local import Purity, WrongAdapter, WrongResult
from harness.loss_scale import LossScaler
from harness.observation import REFUSED, Observation, Sent
from harness.session import CandidateRaised, phase
from harness.world.traffic import Recorder
from reference.loss_scale import OF_STATE, Event, LossScaleCase

#: The facts of an observation: after each event what was seen, by name; and whether a refused load changed something.
SEEN, CHANGED = "seen", "changed"

Build = Callable[[LossScaleCase], object]
Seen = dict[str, Any]


def run(case: LossScaleCase, rank: int, build: Build, traffic: Recorder | None = None) -> Observation:
    """Builds the scaler, has it go through all events, and reads scale, counters and decisions after each.

    Raises WrongAdapter, WrongResult and CandidateRaised as `harness.drive.drive` does.
    """
    purity, one = Purity(), _Run(case, rank, build, traffic)
    one.all()
    sent = None if traffic is None else tuple(one.sent)
    return Observation(side_effects=tuple(purity.report()), sent=sent, facts={SEEN: one.seen})


def attempt(case: LossScaleCase, rank: int, build: Build) -> Observation:
    """Hands over what must be refused: the fact ``refused`` is what was raised, or None."""
    one = _Run(case, rank, build)
    if case.invalid not in OF_STATE:
        try:
            one.all()
        except CandidateRaised as error:
            return Observation(facts={REFUSED: str(error).partition("\n")[0]})
        return Observation(facts={REFUSED: None})
    one.all()
    state, before = one.foreign_state(), one.reading()
    try:
        with phase("load"):
            one.loader()(state)
    except CandidateRaised as error:
        now = one.reading()
        return Observation(facts={REFUSED: str(error).partition("\n")[0], CHANGED: now if now != before else None})
    return Observation(facts={REFUSED: None})


@dataclass
class _Run:
    case: LossScaleCase
    rank: int
    build: Build
    traffic: Recorder | None = None
    sent: list[Sent] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    saved: Any = None

    def all(self) -> None:
        self.scaler = self.built(self.case)
        if any(event.what in ("load", "fresh") for event in self.case.events):
            self.saved = self.state_of(self.scaler)  # what is loaded before anything is saved
        for number, event in enumerate(self.case.events):
            before = len(self.traffic.records()) if self.traffic is not None else 0
            step = self.step(event, number) if event.is_step else self.change(event)
            if self.traffic is not None:
                self.sent += [Sent("finish", number, one) for one in self.traffic.records()[before:]]
            self.seen.append({**step, **self.reading()})

    def built(self, case: LossScaleCase) -> LossScaler:
        with phase("build"):
            made = self.build(case)
        if not isinstance(made, LossScaler):
            raise WrongAdapter(f"loss_scaler returned {reprlib.repr(made)}; expected LossScaler(scale, update)")
        return made

    def step(self, event: Event, number: int) -> Seen:
        hit, seen = event.hits(self.case.mesh, self.rank), Seen()
        gradients = [torch.ones(2), torch.ones(3)]
        if hit:
            gradients[number % 2][number % 2] = float(event.value)
        if self.scaler.check is not None:
            with phase(f"check of event {number}"):
                seen["found"] = hit = bool(self.scaler.check(gradients))
        with phase(f"update of event {number}"):
            skipped = self.scaler.update(hit)
        if not isinstance(skipped, bool):
            raise WrongResult(f"update returned {reprlib.repr(skipped)}; expected whether the step is skipped, a bool")
        return {**seen, "skipped": skipped}

    def change(self, event: Event) -> Seen:
        if event.what == "save":
            self.saved = self.state_of(self.scaler)
        elif event.what == "interval":
            if self.scaler.set_interval is None:
                raise NotOffered("the loss scaler has no set_interval")
            with phase("set_interval"):
                self.scaler.set_interval(event.interval)
        else:
            if event.what == "fresh":
                self.scaler = self.built(self.case)
            with phase("load"):
                self.loader()(self.saved)
        return {}

    def reading(self) -> Seen:
        """The scale, and the counters that the candidate declares."""
        with phase("scale"):
            found: Any = self.scaler.scale()
        if not isinstance(found, float | int) and not (isinstance(found, torch.Tensor) and found.numel() == 1):
            raise WrongResult(f"scale returned {reprlib.repr(found)}; expected a number, or a tensor of one element")
        read = {"scale": float(found)}
        if self.scaler.counters is not None:
            with phase("counters"):
                counters: Any = self.scaler.counters()
            if not isinstance(counters, Mapping) or set(counters) - {"good", "left"}:
                raise WrongAdapter(f"counters returned {reprlib.repr(counters)}; expected 'good' and 'left', or one")
            read |= {name: int(value) for name, value in counters.items()}
        return read

    def state_of(self, scaler: LossScaler) -> Any:
        """The state, as it comes back from a file."""
        if scaler.state is None:
            raise NotOffered("the loss scaler has no state")
        file = io.BytesIO()
        with phase("state"):
            torch.save(scaler.state(), file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def loader(self) -> Callable[[Any], object]:
        if self.scaler.load is None:
            raise NotOffered("the loss scaler has no load")
        return self.scaler.load

    def foreign_state(self) -> Any:
        """A state of another configuration, or one from which the last entry is missing."""
        if self.case.invalid == "state_truncated":
            return cut_short(self.state_of(self.scaler))
        return self.state_of(self.built(replace(self.case, scaling=self.case.other, invalid=None, events=())))


def cut_short(state: Any) -> Any:
    """A saved state without its last entry."""
    if not isinstance(state, Mapping) or not state:
        raise NotOffered(f"its state is {reprlib.repr(state)}: of what is no dict, nothing can be left out")
    kept, last = dict(state), list(state)[-1]
    if isinstance(kept[last], Mapping) and kept[last]:
        return {**kept, last: cut_short(kept[last])}
    del kept[last]
    return kept
