"""Drives a built module forward and backward on one rank, alike for every candidate and subject."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.candidate import Sharded
from harness.local import Purity, WrongResult, as_local, local_tensor, permuted, require_like
from harness.observation import LocalTensor, Observation
from harness.session import phase
from reference.layout import Each, Layout, Window, placements, window
from reference.mesh import Mesh

Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Given:
    """A global tensor that goes in, float64, and its layout."""

    values: torch.Tensor
    layout: Layout
    requires_grad: bool = False


@dataclass(frozen=True)
class Result:
    """A tensor that must come out: its global shape and layout."""

    shape: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward: the inputs in the order of the call, the outputs in the order of return, and the
    gradient of what the consumer makes of them."""

    inputs: Mapping[str, Given]
    outputs: Mapping[str, Result]
    output_grad: Given


@dataclass(frozen=True)
class Exercise:
    """All that one module is put through.

    parameters: global values and whether they train. consume: what the caller does with the outputs before the loss.
    transposed: hand over non-contiguous inputs and gradients. main_grad: read gradients from ``main_grad``.
    """

    mesh: Mesh
    rank: int
    dtype: torch.dtype
    parameters: Mapping[str, Given]
    micro_batches: Sequence[MicroBatch]
    consume: Callable[[Outputs], torch.Tensor] = lambda outputs: outputs[0]
    transposed: bool = False
    main_grad: bool = False
    only_initial: bool = False

    def local(self, given: Given, layout: Layout | None = None) -> torch.Tensor:
        """This rank's part, in the dtype under test, as a tensor of its own."""
        part = self.window(tuple(given.values.shape), layout or given.layout).take(given.values).to(self.dtype)
        return permuted(part) if self.transposed else part.clone(memory_format=torch.contiguous_format)

    def window(self, shape: tuple[int, ...], layout: Layout) -> Window:
        """This rank's window. Raises WrongResult where a layout, which can only be the candidate's, does not fit."""
        try:
            return window(shape, layout, self.mesh, self.rank)
        except ValueError as error:
            raise WrongResult(f"a layout does not fit: {error}") from None


def drive(exercise: Exercise, build: Callable[[], Sharded]) -> Observation:
    """Builds the module, gives it its parameters, runs every micro-batch, and reads what came of it.

    Raises WrongResult where the candidate hands back something that is not what was asked for, and CandidateRaised
    where its code raises.
    """
    tensors: dict[str, LocalTensor | None] = {}
    with phase("build"):
        sharded = build()
    if not isinstance(sharded, Sharded):
        raise WrongResult(f"build returned {reprlib.repr(sharded)}; expected Sharded(module, weight=Split(0, 'tp'))")
    with phase("build"):
        held = {name: sharded.parameter(name) for name in exercise.parameters}
    for name, parameter in held.items():
        tensors[f"{name}.initial"] = local_tensor(f"parameter {name}", parameter)
    layouts = {f"{name}.initial": sharded.layouts[name] for name in held if name in sharded.layouts}
    if exercise.only_initial:
        return Observation(tensors, layouts)
    purity = Purity()
    _load(exercise, sharded, held)
    for m, micro_batch in enumerate(exercise.micro_batches):
        _run(exercise, sharded, micro_batch, tensors, purity, f"micro-batch {m}")
    if sharded.finish is not None:
        with phase("finish"):
            sharded.finish()
    for name, parameter in held.items():
        tensors[f"{name}.grad"] = _gradient(exercise, sharded, f"{name}.grad", parameter)
        layouts[f"{name}.grad"] = _fitting(exercise, name, sharded.grads[name])
    for micro_batch in exercise.micro_batches:
        for name in micro_batch.outputs:
            _note(layouts, name, sharded.outputs, name)
        for name in micro_batch.inputs:
            _note(layouts, f"{name}.grad", sharded.inputs, name)
    return Observation(tensors, layouts, tuple(purity.report()))


def _load(exercise: Exercise, sharded: Sharded, held: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in held.items():
        if name not in sharded.layouts:
            raise WrongResult(f"no layout is given for parameter {name!r}: Sharded(..., {name}=Split(0, 'tp'))")
        given, layout = exercise.parameters[name], sharded.layouts[name]
        part = exercise.window(tuple(given.values.shape), layout).take(given.values)
        require_like(f"parameter {name} with layout {layout}", as_local(parameter), tuple(part.shape), exercise.dtype)
        with phase(f"setting parameter {name}"):
            with torch.no_grad():
                as_local(parameter).copy_(part)
            parameter.requires_grad_(given.requires_grad)


def _run(
    exercise: Exercise,
    sharded: Sharded,
    micro_batch: MicroBatch,
    tensors: dict[str, LocalTensor | None],
    purity: Purity,
    where: str,
) -> None:
    inputs = {
        name: exercise.local(given, sharded.inputs.get(_base(name))).requires_grad_(given.requires_grad)
        for name, given in micro_batch.inputs.items()
    }
    for name, value in inputs.items():
        purity.watch(name, value)
    with phase(f"forward of {where}"):
        returned = sharded.forward(*inputs.values())
    outputs = _outputs(returned, exercise, sharded, micro_batch)
    for name, output in outputs.items():
        tensors[name] = local_tensor(name, output)
    consumed = exercise.consume(tuple(outputs.values()))
    if any(g.requires_grad for g in (*exercise.parameters.values(), *micro_batch.inputs.values())):
        if not consumed.requires_grad:
            raise WrongResult(f"the output of {where} does not require a gradient, although an input or parameter does")
        first = next(iter(outputs))
        gradient = exercise.local(micro_batch.output_grad, sharded.outputs.get(_base(first)))
        purity.watch("the gradient of the output", gradient)
        with phase(f"backward of {where}"):
            torch.autograd.backward(consumed, gradient)
    for name, value in inputs.items():
        tensors[f"{name}.grad"] = None if value.grad is None else local_tensor(f"{name}.grad", value.grad)
    purity.check()


def _outputs(
    returned: object, exercise: Exercise, sharded: Sharded, micro_batch: MicroBatch
) -> dict[str, torch.Tensor]:
    several = list(returned) if isinstance(returned, tuple | list) else [returned]
    wanted = micro_batch.outputs
    if len(several) != len(wanted):
        found = f"{len(several)} values" + (f" ({', '.join(type(v).__name__ for v in several)})" if several else "")
        raise WrongResult(f"forward returned {found}; expected {len(wanted)}: {', '.join(wanted)}")
    outputs = {}
    for (name, result), value in zip(wanted.items(), several, strict=True):
        shape = exercise.window(result.shape, sharded.outputs.get(_base(name), result.layout)).shape
        if not isinstance(value, torch.Tensor):
            raise WrongResult(
                f"forward returned {reprlib.repr(value)} as {name}; expected a tensor of local shape {shape}"
            )
        require_like(name, as_local(value), shape, exercise.dtype)
        outputs[name] = as_local(value)
    return outputs


def _gradient(exercise: Exercise, sharded: Sharded, name: str, parameter: torch.Tensor) -> LocalTensor | None:
    with phase(f"reading {name}"):
        if sharded.read_grad is not None:
            found = sharded.read_grad(parameter)
        else:
            found = getattr(parameter, "main_grad", None) if exercise.main_grad else parameter.grad
    if found is None:
        return None
    read = local_tensor(name, found)
    # A buffer exists also for a frozen parameter: untouched, it is no gradient.
    untouched = exercise.main_grad and not parameter.requires_grad and not bool(found.any())
    return None if untouched else read


def _fitting(exercise: Exercise, name: str, layout: Layout) -> Layout:
    """The layout of a gradient, tried on the parameter."""
    if not any(isinstance(placement, Each) for placement in placements(layout)):
        exercise.window(tuple(exercise.parameters[name].values.shape), layout)
    return layout


def _base(name: str) -> str:
    """A candidate names the layout of ``input`` once, for every ``input[m]``."""
    return name.partition("[")[0]


def _note(layouts: dict[str, Layout], name: str, given: Mapping[str, Layout], tensor: str) -> None:
    if _base(tensor) in given:
        layouts[name] = given[_base(tensor)]
