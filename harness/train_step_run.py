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
from harness.gpt_steps import Running, layout_of
from harness.held import Held
from harness.local import Purity, WrongAdapter, WrongResult, local_tensor, require_like
from harness.mixed_precision_reading import Ranges, Read, decisions, moved, number, ranges_of, unlike
from harness.mixed_precision_steps import MOVED, OWNED, SEEN, Tell, decided
from harness.observation import LocalTensor, Observation
from harness.saved import APART, GONE_ON, STATE, read, together, written
from harness.session import Session, phase
from harness.train_step import Trainer
from harness.world import RankContext
from reference.gpt_parameters import tokens, valid_tokens
from reference.layout import Layout, window
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
class _Part:
    """A trainer, and its parameters on this rank."""

    trainer: Trainer
    running: Running
    parameters: dict[str, Held]
    dropouts: Dropouts


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
    part: _Part = field(init=False)

    def all(self, before: Observation | None = None) -> Observation:
        case, purity = self.case, Purity(draws=self.case.model.dropout > 0)
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
        self.last = self.reading(self.part)

    def begin(self) -> None:
        """Builds the trainer, and gives it its parameters."""
        part = self.part = self._built(0)
        part.running.load(part.parameters)
        if part.trainer.loaded is not None:
            with phase("loaded"):
                part.trainer.loaded()
        self.last = self.reading(part)

    def step(self, step: int) -> None:
        """Makes one, and reads what it decided, its loss and norm, and what moved."""
        if self.case.load and step == self.case.load and not self.case.relaunch:
            self.part = self._resumed(self.part, step)
            self.last = self.reading(self.part)
        self._train(self.part, step)
        if self.gone_on is not None and step == self.case.load:
            read, decided_then = self.gone_on
            self.apart = moved(read, self.last) + unlike(decided_then, self.seen[-1])

    def kept(self) -> Observation:
        """Parameters, masters and state as they are now, and who keeps which elements."""
        part = self.part
        layouts = {name: layout_of(self.case.model, name, said) for name, said in part.running.said.items()}
        owned = {name: self._owned(part, name) for name in part.parameters}
        return Observation(self._tensors_kept(part, layouts), layouts, facts={OWNED: owned})

    def close(self) -> None:
        self._close(self.part)

    @staticmethod
    def _close(part: _Part) -> None:
        if part.trainer.close is not None:
            with phase("close"):
                part.trainer.close()

    def _built(self, step: int) -> _Part:
        case = self.case.seen_by(step)
        with phase("build"):
            made = self.build(case)
        if not isinstance(made, Trainer):
            said = reprlib.repr(made)
            raise WrongAdapter(f"train_step returned {said}; expected Trainer(step, parameters, layouts, ...)")
        if self.case.overflows and made.after_backward is None:
            raise NotOffered("the trainer has no after_backward")
        running = Running(case.model, self.rank, made)
        return _Part(made, running, running.held(), Dropouts(case.model, self.rank, made))

    def _resumed(self, before: _Part, step: int) -> _Part:
        """A new trainer with the state of the old one, and of its weights nothing but that."""
        file = self._saved(before)
        self._close(before)  # who has one trainer at a time cannot build the next before
        return self._loaded(file, step)

    def _saved(self, part: _Part) -> bytes:
        """The file of its state. Where others of the same mesh are to load it, who saved makes the same step first:
        what saving has changed shows then, and what the state lacks."""
        if part.trainer.save is None:
            raise NotOffered("the trainer has no save")
        file = written(part.trainer.save)
        if self.case.resume == "same":
            step = self.case.load
            self._hook(part, step)
            with phase(f"step {step} after saving"):
                part.trainer.step(*self._batch(step))
                skipped = part.trainer.skipped()
            self.gone_on = self.reading(part), {"skipped": skipped, **decisions(part.trainer)}
        return file

    def _hook(self, part: _Part, step: int) -> None:
        after_backward = part.trainer.after_backward
        if self.case.overflows and after_backward is not None:
            with phase("after_backward"):
                after_backward(lambda: self._overflow(part, step))

    def _loaded(self, file: bytes, step: int) -> _Part:
        made = self._built(step)
        state = read(file)  # now that there are groups, which what it holds may ask for
        if made.trainer.load is None:
            raise NotOffered("the trainer has no load")
        with phase("load"):
            made.trainer.load(state)
        return made

    def _train(self, part: _Part, step: int) -> None:
        case, trainer = self.case, part.trainer
        scale = number("scale", trainer.scale)
        self._hook(part, step)
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
        now = self.reading(part)
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

    def _overflow(self, part: _Part, step: int) -> None:
        for name, element, value in self.case.hits(self.rank, step):
            held = part.parameters[name]
            gradient = self._gradient(part, held.tensor)
            positions = torch.arange(gradient.numel()) if held.positions is None else held.positions.flatten()
            at = int(positions[element % positions.numel()])
            place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), gradient.shape))
            with torch.no_grad():
                gradient[place] = float(value)

    def _gradient(self, part: _Part, tensor: torch.Tensor) -> torch.Tensor:
        read = part.trainer.read_grad
        if read is not None:
            found = read(tensor)
        else:
            found = getattr(tensor, "main_grad", None) if self.case.model.main_grad else tensor.grad
        if found is None:
            found = tensor.grad = torch.zeros_like(tensor)
        return found

    def reading(self, part: _Part) -> Read:
        """Copies of this rank's parameters, and of masters and state of the elements that it keeps."""
        trainer, found = part.trainer, Read()
        for name, parameter in part.parameters.items():
            found[name] = parameter.local()
            kept = sum(max(0, stop - start) for start, stop in self._owned(part, name))
            for kind in self.case.kept:
                what = f"{name}.{kind}"
                with phase(f"reading {what}"):
                    if kind == "master" and trainer.master is not None:
                        found[what] = trainer.master(name)
                    elif kind != "master" and trainer.state is not None:
                        found[what] = trainer.state(name, kind)
                if what in found:
                    require_like(f"{what} of the elements kept", found[what], (kept,), torch.float32)
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def _owned(self, part: _Part, name: str) -> Ranges:
        size = part.parameters[name].local().numel()
        return ((0, size),) if part.trainer.owned is None else ranges_of(name, part.trainer.owned, size)

    def _tensors_kept(self, part: _Part, layouts: dict[str, Layout]) -> dict[str, LocalTensor | None]:
        """All that is offered; of parameters on other stages, tensors without elements."""
        case, read, found = self.case, self.last, dict[str, LocalTensor | None]()
        by = {"master": part.trainer.master}
        offered = [kind for kind in case.kept if by.get(kind, part.trainer.state) is not None]
        for name, layout in layouts.items():
            shape = window(part.running.shapes[name], layout, case.mesh, self.rank).shape
            for what in (name, *(f"{name}.{kind}" for kind in offered)):
                own = read.get(what)
                dtype = case.model.format.torch_dtype if what == name else torch.float32
                found[what] = local_tensor(what, torch.zeros(shape, dtype=dtype) if own is None else own)
        return found
