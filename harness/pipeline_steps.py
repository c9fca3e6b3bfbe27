"""Drives a pipeline through the steps of a case on one rank, alike for every candidate."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from harness.local import Purity, WrongAdapter, WrongResult, as_local, local_tensor, require_like
from harness.observation import LocalTensor, Observation, Sent
from harness.one_process import OneProcess, inputs_of, seeded
from harness.oracle.compare import same_bits
from harness.pipeline import Pipeline
from harness.session import CandidateRaised, phase
from harness.stages import Seen, StageModule, build
from harness.world.traffic import Recorder
from reference.pipeline import PipelineCase, Tensors
from reference.pipeline_gradients import at_start
from reference.pipeline_stages import parameters, tied, valid_tokens

#: The facts of an observation: names whose bits are not those of one process; the most micro-batches in flight; by
#: stage, how many different draws its dropout made.
BITS, IN_FLIGHT, DRAWS = "bits", "in_flight", "draws"

Build = Callable[[Sequence[StageModule]], object]


def run(case: PipelineCase, given: Tensors, rank: int, build_: Build, traffic: Recorder | None = None) -> Observation:
    """Builds this rank's stages, has the candidate run every step, and reads gradients, parameters and the loss.

    Raises WrongAdapter, WrongResult and CandidateRaised as `harness.drive.drive` does.
    """
    return _Run(case, given, rank, traffic).all(build_)


def attempt(case: PipelineCase, given: Tensors, rank: int, build_: Build) -> Observation:
    """The same where something is invalid: the fact ``refused`` is what was raised, or None."""
    try:
        _Run(case, given, rank).all(build_)
    except CandidateRaised as error:
        return Observation(facts={"refused": str(error)})
    return Observation(facts={"refused": None})


@dataclass
class _Run:
    case: PipelineCase
    given: Tensors
    rank: int
    traffic: Recorder | None = None
    sent: list[Sent] = field(default_factory=list)
    tensors: dict[str, LocalTensor | None] = field(default_factory=dict)
    bits: list[str] = field(default_factory=list)

    def all(self, build_: Build) -> Observation:
        case, mesh = self.case, self.case.mesh
        self.replica = mesh.coordinate(self.rank, case.replica_axes)
        self.coordinate = mesh.coordinate(self.rank, case.axis)
        values = {name: value[self.replica] for name, value in at_start(case, self.given).items()}
        numbers = case.stages_on(self.coordinate)
        self.log: list[int] = []
        self.seen = [Seen(self.log) for _ in numbers]
        self.stages = [
            build(case, self.given, values, number, seen) for number, seen in zip(numbers, self.seen, strict=True)
        ]
        purity, handed = Purity(), self.stages
        if case.invalid == "chunks" and self.coordinate == case.parallel_size - 1:
            handed = self.stages[:-1] if len(self.stages) > 1 else self.stages * 2
        random = torch.get_rng_state()
        with phase("build"):
            built = build_(handed)
        self.pipeline = _require(built)
        self.purity = purity
        self.held = {name: p for stage in self.stages for name, p in stage.named().items()}
        if case.update == "none":
            for name, parameter in self.held.items():
                purity.watch(f"parameter {name}", as_local(parameter))
        one = OneProcess(case, self.given, values, self.replica) if not case.invalid else None
        for step in range(case.steps):
            self._step(step)
            if one is not None and case.update == "none":
                with torch.enable_grad():  # as it was before the candidate
                    self._compare(one.step(step), step)
        if self.pipeline.close is not None:
            with phase("close"):
                self.pipeline.close()
        if case.drops:  # stages draw as they like
            torch.set_rng_state(random)
        purity.release()
        facts = {BITS: tuple(self.bits), IN_FLIGHT: in_flight(self.log), DRAWS: self._draws()}
        sent = None if self.traffic is None else tuple(self.sent)
        return Observation(self.tensors, {}, tuple(purity.report()), sent, facts=facts)

    def _step(self, step: int) -> None:
        case, pipeline = self.case, self.pipeline
        if not (case.accumulate and step):
            with phase("zero_grad"):
                if pipeline.zero_grad is not None:
                    pipeline.zero_grad()
                else:
                    for held in self.held.values():
                        held.grad = None
        if case.drops and not step:
            torch.set_rng_state(seeded(self.coordinate).get_state())
        inputs = inputs_of(case, self.given, self.replica, step)
        valid = valid_tokens(case, step)[self.replica]
        names = ["input", "ids"][: len(inputs)]
        for name, x in zip([*names, "valid"], [*inputs, valid], strict=True):
            self.purity.watch(f"{name}[{step}]", x)
        before = 0 if self.traffic is None else len(self.traffic.records())
        with phase(f"step {step}"):
            loss = pipeline.step(inputs, valid)
        if self.traffic is not None:
            self.sent += [Sent("forward", step, one) for one in self.traffic.records()[before:]]
        self.purity.release([f"{name}[{step}]" for name in [*names, "valid"]])
        for x in (*inputs, valid):
            x.zero_()  # what is still being sent would change
        self._read_loss(step, loss)
        for name, parameter in parameters(case).items():
            what = f"{name}[{step}]" if case.update == "sharded" else f"{name}[{step}].grad"
            self._read(what, name, (0, *parameter.shape[1:]), parameter.trains)

    def _read_loss(self, step: int, loss: torch.Tensor | None) -> None:
        case, name = self.case, f"loss[{step}]"
        if case.coordinate_of(case.stages - 1) != self.coordinate:
            if loss is not None:
                raise WrongResult(f"{name} is {reprlib.repr(loss)} on a rank without the last stage; expected None")
            loss = torch.zeros(0, dtype=case.loss_format.torch_dtype)
        else:
            if loss is None:
                raise WrongResult(f"{name} is None on the rank of the last stage; expected a scalar")
            require_like(name, loss, (), case.loss_format.torch_dtype)
            loss = loss.detach().reshape(1)
        self.tensors[name] = local_tensor(name, loss)

    def _read(self, what: str, name: str, nothing: tuple[int, ...], trains: bool) -> None:
        """What this rank has of a parameter: all or nothing."""
        if name not in self.held:
            if trains or self.case.update == "sharded":
                self.tensors[what] = local_tensor(what, torch.zeros(nothing, dtype=self.case.format.torch_dtype))
            return
        parameter = self.held[name]
        with phase(f"reading {what}"):
            if self.case.update == "sharded":
                found: torch.Tensor | None = parameter.detach()
            elif self.pipeline.read_grad is not None:
                found = self.pipeline.read_grad(parameter)
            else:
                found = parameter.grad
        self.tensors[what] = None if found is None else local_tensor(what, found)

    def _compare(self, want: Tensors, step: int) -> None:
        """With the gradients of one process, bit by bit, but for sums of more than two copies, whose order is free."""
        copies = [block.copy for block in tied(self.case)]
        for name, right in want.items():
            what = f"{name}[{step}].grad"
            found = self.tensors.get(what)
            if name not in self.held or found is None or found.values is None or (name in copies and len(copies) > 2):
                continue
            ours = right.to(torch.float64).numpy()
            if found.values.shape == ours.shape and not same_bits(found.values + 0.0, ours + 0.0):
                self.bits.append(what)

    def _draws(self) -> dict[int, int]:
        return {stage.number: len(set(one.draws)) for stage, one in zip(self.stages, self.seen, strict=True)}


def in_flight(log: Sequence[int]) -> int:
    """The most micro-batches, over all stages of a rank, that were between forward and backward."""
    return max(itertools.accumulate(log), default=0)


def _require(built: object) -> Pipeline:
    if not isinstance(built, Pipeline):
        raise WrongAdapter(f"pipeline returned {reprlib.repr(built)}; expected Pipeline(step)")
    return built
