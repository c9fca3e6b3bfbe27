"""Drives a built module forward and backward on one rank, alike for every candidate and subject."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from harness.drawn import DRAWN, Drawn, Draws, masks_of
from harness.exercise import Exercise, MicroBatch
from harness.held import Held, held, require_apart
from harness.local import Purity, WrongAdapter, WrongResult, as_local, local_tensor, require_like
from harness.module import Sharded
from harness.observation import LocalTensor, Observation, Sent
from harness.session import CandidateRaised, phase
from harness.wiring import initial, layout_of, require_known, require_parameter, require_sharded
from harness.world.traffic import Recorder
from reference.layout import Layout, of_gradient
from reference.traffic import Phase


def drive(exercise: Exercise, build: Callable[[], Sharded], traffic: Recorder | None = None) -> Observation:
    """Builds the module, gives it its parameters, runs every micro-batch, and reads what came of it.

    traffic: records the collectives of this rank; without it none are reported.

    Raises WrongAdapter where the candidate describes what it built wrongly, WrongResult where the module hands back
    something that is not what was asked for, and CandidateRaised where its code raises.
    """
    with phase("build"):
        built = build()
    sharded = require_sharded(built)
    require_known(exercise.names, sharded)
    return _Drive(exercise, sharded, traffic).run()


def attempt(exercise: Exercise, build: Callable[[], Sharded]) -> Observation:
    """Builds the module and runs one forward that it has to refuse: the fact ``refused`` is what it raised, or None.

    Raises as `drive`, but for what building or forward raise.
    """
    try:
        with phase("build"):
            sharded = require_sharded(build())
        require_known(exercise.names, sharded)
        _Drive(exercise, sharded).first_forward()
    except CandidateRaised as error:
        return Observation(facts={"refused": str(error).partition("\n")[0]})
    return Observation(facts={"refused": None})


@dataclass(frozen=True)
class _InFlight:
    """A micro-batch between its forward and its backward."""

    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    consumed: torch.Tensor


@dataclass
class _Drive:
    """One module on its way through an exercise, and what was observed so far."""

    exercise: Exercise
    sharded: Sharded
    traffic: Recorder | None = None
    sent: list[Sent] = field(default_factory=list)
    tensors: dict[str, LocalTensor | None] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    drawn: dict[tuple[int, str], Drawn] = field(default_factory=dict)

    def run(self) -> Observation:
        parameters = self._held()
        for name, parameter in parameters.items():
            self.tensors[f"{name}.initial"] = initial(name, parameter)
            if name in self.sharded.layouts:
                self.layouts[f"{name}.initial"] = self.sharded.layouts[name]
        if self.exercise.only_initial:
            return Observation(self.tensors, self.layouts)
        self.purity = Purity()
        self._load(parameters)
        self._micro_batches()
        if self.sharded.finish is not None and self.exercise.backward != "never":
            with phase("finish"), self._sending("finish", 0):
                self.sharded.finish()
        for name, parameter in parameters.items():
            self._read_gradient(name, parameter)
        self.purity.release()
        said, names = self.sharded, self.exercise.names
        departs = bool(said.inputs or said.outputs or any(name in names.inputs for name in said.grads))
        effects = tuple(self.purity.report())
        sent = None if self.traffic is None else tuple(self.sent)
        facts = {DRAWN: self.drawn} if self.drawn else {}
        return Observation(self.tensors, self.layouts, effects, sent, departs=departs, facts=facts)

    @contextmanager
    def _sending(self, what: Phase, m: int) -> Iterator[None]:
        """What is sent inside belongs to a phase of a micro-batch."""
        before = 0 if self.traffic is None else len(self.traffic.records())
        yield
        if self.traffic is not None:
            self.sent += [Sent(what, m, one) for one in self.traffic.records()[before:]]

    def first_forward(self) -> None:
        self.purity = Purity()
        self._load(self._held())
        self._forward(0)

    def _held(self) -> dict[str, Held]:
        with phase("build"):
            found = {name: self.sharded.parameter(name) for name in self.exercise.parameters}
        return {name: held(name, parameter) for name, parameter in found.items()}

    def _load(self, parameters: Mapping[str, Held]) -> None:
        require_apart(parameters, {name: given.requires_grad for name, given in self.exercise.parameters.items()})
        for name, parameter in parameters.items():
            given, layout = self.exercise.parameters[name], layout_of(name, self.sharded)
            shape, what = tuple(given.values.shape), f"parameter {name}"
            part, local = self.exercise.window(what, shape, layout).take(given.values), parameter.local()
            require_parameter(name, local, layout, shape, tuple(part.shape), self.exercise.dtype)
            with phase(f"setting {what}"):
                parameter.fill(part)
                parameter.tensor.requires_grad_(given.requires_grad)
            self.purity.watch(what, as_local(parameter.tensor), parameter.of)

    def _micro_batches(self) -> None:
        """Forwards and backwards in the order that the exercise asks for."""
        numbers = range(len(self.exercise.micro_batches))
        if self.exercise.backward == "immediate":
            for m in numbers:
                self._backward(m, self._forward(m))
            return
        with torch.no_grad() if self.exercise.backward == "never" else nullcontext():
            in_flight = [self._forward(m) for m in numbers]
        for m in reversed(numbers) if self.exercise.backward == "reversed" else numbers:
            self._backward(m, in_flight[m])

    def _forward(self, m: int) -> _InFlight:
        exercise, sharded, micro_batch = self.exercise, self.sharded, self.exercise.micro_batches[m]
        inputs = {}
        for name, given in micro_batch.inputs.items():
            said = exercise.said(sharded.inputs, name)
            of_grad = exercise.said(sharded.grads, name) or (said and of_gradient(said))
            if of_grad:
                self.layouts[f"{name}.grad"] = of_grad
            inputs[name] = exercise.local(name, given, said).requires_grad_(given.requires_grad)
            self.purity.watch(name, inputs[name])
        with phase(f"forward of micro-batch {m}"), self._sending("forward", m), self._drawing(m):
            returned = sharded.forward(*inputs.values())
        outputs = self._outputs(returned, micro_batch)
        for name, output in outputs.items():
            self.tensors[name] = local_tensor(name, output)
            self.purity.watch(name, output)
        return _InFlight(inputs, outputs, exercise.consume(tuple(outputs.values())))

    @contextmanager
    def _drawing(self, m: int) -> Iterator[None]:
        """What forward draws inside are the masks of a micro-batch, where the candidate says which these are."""
        due = self.exercise.micro_batches[m].masks
        if not (due and self.sharded.masks):
            yield
            return
        if sorted(self.sharded.masks) != sorted(due):
            raise WrongAdapter(f"Sharded(..., masks={self.sharded.masks!r}): expected an order of {', '.join(due)}")
        with Draws() as draws:
            yield
        named = {place: due[place] for place in self.sharded.masks}
        parts = {p: self.exercise.window(f"the mask of {p}", one.shape, one.layout).shape for p, one in named.items()}
        self.drawn |= masks_of(m, draws.found, parts)

    def _outputs(self, returned: object, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        several = list(returned) if isinstance(returned, tuple | list) else [returned]
        wanted = micro_batch.outputs
        if len(several) != len(wanted):
            found = f"{len(several)} values" + (f" ({', '.join(type(v).__name__ for v in several)})" if several else "")
            raise WrongResult(f"forward returned {found}; expected {len(wanted)}: {', '.join(wanted)}")
        outputs = {}
        for (name, result), value in zip(wanted.items(), several, strict=True):
            said = self.exercise.said(self.sharded.outputs, name)
            layout = self.layouts[name] = said or result.layout
            shape = self.exercise.window(name, result.shape, layout).shape
            if not isinstance(value, torch.Tensor):
                raise WrongResult(
                    f"forward returned {reprlib.repr(value)} as {name}; expected a tensor of local shape {shape}"
                )
            require_like(name, as_local(value), shape, result.dtype or self.exercise.dtype)
            outputs[name] = as_local(value)
        return outputs

    def _backward(self, m: int, flight: _InFlight) -> None:
        """Backward where anything trains; then the micro-batch is done with, and its tensors may be reused."""
        micro_batch = self.exercise.micro_batches[m]
        done = [*flight.inputs, *flight.outputs]
        if self.exercise.trains:
            if not flight.consumed.requires_grad:
                raise WrongResult(
                    f"the output of micro-batch {m} does not require a gradient, although an input or parameter does"
                )
            first = next(iter(flight.outputs))
            what = f"the gradient of {first}"
            gradient = self.exercise.local(what, micro_batch.output_grad, of_gradient(self.layouts[first]))
            self.purity.watch(what, gradient)
            done.append(what)
            with phase(f"backward of micro-batch {m}"), self._sending("backward", m):
                torch.autograd.backward(flight.consumed, gradient)
        for name, value in flight.inputs.items():
            self.tensors[f"{name}.grad"] = None if value.grad is None else local_tensor(f"{name}.grad", value.grad)
        self.purity.release(done)

    def _read_gradient(self, name: str, parameter: Held) -> None:
        what, exercise, tensor = f"{name}.grad", self.exercise, parameter.tensor
        with phase(f"reading {what}"):
            if self.sharded.read_grad is not None:
                found = self.sharded.read_grad(tensor)
            else:
                found = getattr(tensor, "main_grad", None) if exercise.main_grad else tensor.grad
        read = None if found is None else local_tensor(what, parameter.gradient(what, found))
        # A buffer exists also for a parameter that gets no gradient: untouched, it is none.
        trains = exercise.trains and tensor.requires_grad
        if found is not None and exercise.main_grad and not trains and not bool(found.any()):
            read = None
        self.tensors[what] = read
        said = exercise.said(self.sharded.grads, name)
        if said is not None:
            shape = tuple(exercise.parameters[name].values.shape)
            replicas = exercise.mesh.axis_size(exercise.replica_axes)
            exercise.window(what, (replicas, *shape), said)  # refuses what does not fit
            self.layouts[what] = said
