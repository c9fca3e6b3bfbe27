"""Drives a trainer through the steps of a case on one rank, alike for every candidate."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.candidate import NotOffered
from harness.drawn import DRAWN
from harness.find import Spec
from harness.gpt_draws import Dropouts, Masks
from harness.gpt_steps import Running
from harness.local import Purity, WrongAdapter, WrongResult, local_tensor
from harness.mixed_precision_reading import Read, decisions, moved, number, unlike
from harness.mixed_precision_steps import MOVED, SEEN, Tell, decided
from harness.observation import LocalTensor, Observation
from harness.saved import APART, GONE_ON, STATE, read, together, written
from harness.session import Session, phase
from harness.train_step import Trainer
from harness.trainer_on_rank import TrainerOnRank
from harness.world import RankContext
from reference.gpt_parameters import tokens, valid_tokens
from reference.train_step import TrainStepCase

Build = Callable[[TrainStepCase], object]


def builder(context: RankContext, spec: Spec) -> Build:
    """How the candidate builds its trainer on this rank."""
    session = Session.of(context, spec)

    def build(asked: TrainStepCase) -> object:
        # Where ranks along dp train alone, they are on another mesh.
        candidate = session.on(asked.mesh)
        if not candidate.offers("train_step"):
            raise NotOffered(f"{spec.text} has no train_step")
        return candidate.train_step(asked)

    return build


def run(
    case: TrainStepCase,
    rank: int,
    build: Build,
    tell: Tell = lambda text: None,
    before: Observation | None = None,
) -> Observation:
    """Builds the trainer, gives it its parameters, makes every step, and reads decisions, losses and norms of each, and
    all values at the end.

    build: called with the case as the ranks are to work on it, again where a state is loaded. tell: see `decided`.
    before: what this rank's process before this one has returned, whose steps this one carries on; with ``relaunch``
    and without it only the steps until then are made, and the state is the fact ``state``.
    Raises WrongAdapter, WrongResult and CandidateRaised as `harness.drive.drive` does.
    """
    return Run(case, rank, build, tell).all(before)


@dataclass
class Run:
    """The steps on one rank: `begin`, then each `step` in its order, then `kept` and `close`."""

    case: TrainStepCase
    rank: int
    build: Build
    tell: Tell = lambda text: None
    tensors: dict[str, LocalTensor | None] = field(default_factory=dict)
    seen: list[dict[str, Any]] = field(default_factory=list)
    moved_in: list[list[str]] = field(default_factory=list)
    last: Read = field(default_factory=dict)
    drawn: dict[int, Masks] = field(default_factory=dict)
    gone_on: tuple[Read, dict[str, Any]] | None = None
    apart: list[str] = field(default_factory=list)
    part: TrainerOnRank = field(init=False)
    purity: Purity = field(init=False)

    def __post_init__(self) -> None:
        self.purity = Purity(draws=self.case.model.dropout > 0)

    def all(self, before: Observation | None = None) -> Observation:
        case, purity = self.case, self.purity
        if before is None:
            self.begin()
        else:
            self._carry_on(before)
        parts = case.relaunch and before is None
        for step in range(0 if before is None else case.load, case.load if parts else case.steps):
            self.step(step)
        kept = Observation(facts={STATE: self._saved(self.part), GONE_ON: self.gone_on}) if parts else self.kept()
        self.close()
        facts: dict[str, object] = {SEEN: self.seen, MOVED: self.moved_in, APART: self.apart, **kept.facts}
        facts |= {DRAWN: self.drawn} if case.model.dropout else {}
        return Observation({**self.tensors, **kept.tensors}, kept.layouts, together(before, purity), facts=facts)

    def _carry_on(self, before: Observation) -> None:
        """With a new trainer, that loads the state."""
        facts = before.facts
        self.tensors, self.seen, self.moved_in = dict(before.tensors), list(facts[SEEN]), list(facts[MOVED])
        self.drawn, self.gone_on = dict(facts.get(DRAWN, {})), facts[GONE_ON]
        self.tell(decided(self.seen))
        self.part = self._loaded(facts[STATE], self.case.load)
        self.last = self.part.reading()

    def begin(self) -> None:
        """Builds the trainer, and gives it its parameters."""
        part = self.part = self._built(0)
        part.running.load(part.parameters)
        if part.trainer.loaded is not None:
            with phase("loaded"):
                part.trainer.loaded()
        self.last = part.reading()

    def step(self, step: int) -> None:
        """Makes one, and reads what it decided, its loss and norm, and what moved."""
        if self.case.load and step == self.case.load and not self.case.relaunch:
            self.part = self._resumed(self.part, step)
            self.last = self.part.reading()
        self._train(self.part, step)
        if self.gone_on is not None and step == self.case.load:
            read, decided_then = self.gone_on
            self.apart = moved(read, self.last) + unlike(decided_then, self.seen[-1])

    def kept(self) -> Observation:
        """Parameters, masters and state as they are now, and who keeps which elements."""
        return self.part.kept(self.last)

    def close(self) -> None:
        self.part.close()

    def _built(self, step: int) -> TrainerOnRank:
        case = self.case.seen_by(step)
        with self.purity.drawing(), phase("build"):
            made = self.build(case)
        if not isinstance(made, Trainer):
            said = reprlib.repr(made)
            raise WrongAdapter(f"train_step returned {said}; expected Trainer(step, parameters, layouts, ...)")
        if self.case.overflows and made.after_backward is None:
            raise NotOffered("the trainer has no after_backward")
        running = Running(case.model, self.rank, made)
        return TrainerOnRank(self.case, self.rank, made, running, running.held(), Dropouts(case.model, self.rank, made))

    def _resumed(self, before: TrainerOnRank, step: int) -> TrainerOnRank:
        """A new trainer with the state of the old one, and of its weights nothing but that."""
        file = self._saved(before)
        before.close()  # who has one trainer at a time cannot build the next before
        return self._loaded(file, step)

    def _saved(self, part: TrainerOnRank) -> bytes:
        """The file of its state. Where others of the same mesh are to load it, who saved makes the same step first:
        what saving has changed shows then, and what the state lacks."""
        if part.trainer.save is None:
            raise NotOffered("the trainer has no save")
        file = written(part.trainer.save)
        if self.case.resume == "same":
            step = self.case.load
            part.hook(step)
            with phase(f"step {step} of the trainer that saved, and goes on"):
                part.trainer.step(*self._batch(step))
                skipped = part.trainer.skipped()
            self.gone_on = part.reading(), {"skipped": skipped, **decisions(part.trainer)}
        return file

    def _loaded(self, file: bytes, step: int) -> TrainerOnRank:
        made = self._built(step)
        state = read(file)  # now that there are groups, which what it holds may ask for
        if made.trainer.load is None:
            raise NotOffered("the trainer has no load")
        with self.purity.drawing(), phase("load"):
            made.trainer.load(state)
        return made

    def _train(self, part: TrainerOnRank, step: int) -> None:
        case, trainer = self.case, part.trainer
        scale = number("scale", trainer.scale)
        part.hook(step)
        handed = self._batch(step)
        copies = [x.clone() for x in handed]
        with part.dropouts.seeing() as seen, phase(f"step {step}"):
            loss = trainer.step(*handed)
        self.drawn[step] = part.dropouts.masks(seen)
        if not all(map(torch.equal, handed, copies)):
            raise WrongResult(f"step {step} changed its batch; expected ids, targets and valid to stay as they are")
        self.tensors[f"loss[{step}]"] = part.running.loss_seen(loss)
        with phase("skipped"):
            skipped: Any = trainer.skipped()
        if not isinstance(skipped, bool):
            raise WrongResult(
                f"skipped returned {reprlib.repr(skipped)}; expected whether the step was skipped, a bool"
            )
        self.seen.append({"by": scale, "skipped": skipped, **decisions(trainer)})
        self.tell(decided(self.seen))
        now = part.reading()
        self.moved_in.append(moved(self.last, now))
        self.last = now
        for what, function in (("norm", trainer.norm), ("coefficient", trainer.coefficient)):
            if function is not None and case.clip and not skipped:
                found = torch.tensor([number(what, function)], dtype=torch.float64)
                self.tensors[f"{what}[{step}]"] = local_tensor(what, found)

    def _batch(self, step: int) -> list[torch.Tensor]:
        """This rank's ids, targets and valid, each [sequences, tokens]; those of all ranks where it is alone."""
        case, batch = self.case, self.case.batch(step)
        whole = [x[0] for x in (*tokens(batch), valid_tokens(batch))]
        if case.is_alone(step):
            return [x.flatten(0, 1).clone() for x in whole]
        return [x[case.mesh.coordinate(self.rank, "dp")].clone() for x in whole]
