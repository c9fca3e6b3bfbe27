"""Drives a GPT through the step of a case on one rank, alike for every candidate."""

from __future__ import annotations

import reprlib
from collections.abc import Callable

import torch

from harness.drawn import DRAWN
from harness.gpt import Gpt
from harness.gpt_draws import Dropouts
from harness.held import Held, held, require_apart
from harness.local import Purity, WrongAdapter, WrongResult, as_local, local_tensor, require_like
from harness.observation import LocalTensor, Observation
from harness.session import phase
from harness.wiring import require_parameter
from reference.gpt import GptCase
from reference.gpt_parameters import OUTPUT, base_name, owner_of, shapes, tensors, tokens, valid_tokens
from reference.gpt_step import value_of
from reference.layout import Layout, Split, Whole, layout_text, placements, window


def run(case: GptCase, rank: int, build: Callable[[], object]) -> Observation:
    """Builds the model, gives it its parameters, has it take the step, and reads the loss and what came of every
    parameter.

    Raises WrongAdapter, WrongResult and CandidateRaised as `harness.drive.drive` does.
    """
    with phase("build"):
        built = build()
    if not isinstance(built, Gpt):
        raise WrongAdapter(f"gpt returned {reprlib.repr(built)}; expected Gpt(step, parameters, layouts)")
    return Running(case, rank, built).all()


def layout_of(case: GptCase, name: str, said: Layout) -> Layout:
    """How a parameter lies on all ranks: its owners along pp have it, cut as the candidate says, and the others nothing
    of it."""
    rows = shapes(case)[name][0]
    sizes = tuple(rows * (c == owner_of(case, name)) for c in range(case.mesh.axis_size("pp")))
    return (Split(0, "pp", sizes), *placements(said))


class Running:
    """One rank's part of a model, and what is seen of it."""

    def __init__(self, case: GptCase, rank: int, gpt: Gpt) -> None:
        self.case, self.rank, self.gpt = case, rank, gpt
        self.shapes, self.stage = shapes(case), case.mesh.coordinate(rank, "pp")
        self.said = {name: self._layout(name) for name in self.shapes}
        self.tensors: dict[str, LocalTensor | None] = {}

    def all(self) -> Observation:
        case, gpt, mesh = self.case, self.gpt, self.case.mesh
        parameters = self.held()
        self.purity = Purity(draws=case.dropout > 0)
        self.load(parameters)
        if case.update == "none":
            for name, parameter in parameters.items():
                self.purity.watch(f"parameter {name}", as_local(parameter.tensor), parameter.of)
        if gpt.loaded is not None:
            with phase("loaded"):
                gpt.loaded()
        at = mesh.coordinate(self.rank, case.replica_axes), mesh.coordinate(self.rank, "dp")
        handed = [x[at].clone() for x in (*tokens(case), valid_tokens(case))]
        for name, x in zip(("ids", "targets", "valid"), handed, strict=True):
            self.purity.watch(name, x)
        dropouts = Dropouts(case, self.rank, gpt)
        with dropouts.seeing() as seen, phase("step"):
            loss = gpt.step(*handed)
        self.tensors["loss"] = self.loss_seen(loss)
        for name in self.shapes:
            self._read(name, parameters.get(name))
        if gpt.close is not None:
            with phase("close"):
                gpt.close()
        self.purity.release()
        what = "" if case.update == "sharded" else ".grad"
        layouts = {name + what: layout_of(case, name, said) for name, said in self.said.items()}
        facts = {DRAWN: {0: dropouts.masks(seen)}} if case.dropout else {}
        return Observation(self.tensors, layouts, tuple(self.purity.report()), facts=facts)

    def _layout(self, name: str) -> Layout:
        """What the candidate says. Raises WrongAdapter for a cut that other stages, which hold nothing, cannot have."""
        said = self.gpt.layouts.get(name, self.gpt.layouts.get(base_name(name), Whole()))
        for part in placements(said):
            if not isinstance(part, Split) or (part.sizes is not None and part.dim in (0, -len(self.shapes[name]))):
                raise WrongAdapter(
                    f"the layout {layout_text(said)} of {name}: expected Whole(), or Split(...) without sizes where it "
                    "cuts the first dimension; correct Gpt(..., layouts=...)"
                )
        return said

    def held(self) -> dict[str, Held]:
        """Every parameter of this rank's stages, and no other."""
        due = [name for name in self.shapes if owner_of(self.case, name) == self.stage]
        said = f"{type(self.gpt).__name__}(..., parameters=...)"
        for name in due:
            if name not in self.gpt.parameters:
                has = reprlib.repr(sorted(set(self.gpt.parameters) - set(due)) or sorted(self.gpt.parameters))
                raise WrongAdapter(f"{said} lacks {name}, which pp={self.stage} holds: name it (it has: {has})")
        for name in self.gpt.parameters:
            if name not in due:
                where = f"pp={owner_of(self.case, name)}" if name in self.shapes else "no rank of the case"
                raise WrongAdapter(f"{said} names {name} on pp={self.stage}: {where} holds it")
        known = {*self.shapes, *map(base_name, self.shapes)}
        for name in self.gpt.layouts:
            if name not in known and not self._optional(name):
                raise WrongAdapter(f"Gpt(..., layouts=...) names {name!r}: expected some of {', '.join(sorted(known))}")
        return {name: held(name, self.gpt.parameters[name]) for name in due}

    @staticmethod
    def _optional(name: str) -> bool:
        """Layouts may cover what other cases have."""
        return name.endswith(("_weight", "_bias"))

    def load(self, parameters: dict[str, Held]) -> None:
        """Gives all parameters the values of the case."""
        case, given = self.case, tensors(self.case)
        apart = {name: one for name, one in parameters.items() if not (case.tied and name == OUTPUT)}
        require_apart(apart, dict.fromkeys(apart, True))
        for name, parameter in parameters.items():
            values, said = value_of(case, given, name), self.said[name]
            try:
                part = window(tuple(values.shape), said, case.mesh, self.rank).take(values)
            except ValueError as error:
                text = f"the layout {layout_text(said)} of {name} does not fit"
                raise WrongAdapter(f"{text}, correct it in Gpt(..., layouts=...): {error}") from None
            local = parameter.local()
            dtype = case.format.torch_dtype
            require_parameter(name, local, said, tuple(values.shape), tuple(part.shape), dtype)
            with phase(f"setting parameter {name}"):
                parameter.fill(part)

    def loss_seen(self, loss: object) -> LocalTensor:
        """What `step` returned, [1], or [0] where there must be none."""
        case = self.case
        if case.mesh.axis_size("pp") - 1 != self.stage:
            if loss is not None:
                raise WrongResult(f"the loss is {reprlib.repr(loss)} on a rank without the last stage; expected None")
            nothing = torch.zeros(0, dtype=case.loss_format.torch_dtype)
            return local_tensor("loss", nothing)
        if not isinstance(loss, torch.Tensor):
            raise WrongResult(f"the loss is {reprlib.repr(loss)} on a rank of the last stage; expected a scalar tensor")
        require_like("the loss", loss, (), case.loss_format.torch_dtype)
        return local_tensor("loss", loss.detach().reshape(1))

    def _read(self, name: str, parameter: Held | None) -> None:
        """What came of a parameter: its gradient, or its new values. Of those on other stages there is nothing."""
        case = self.case
        what = name if case.update == "sharded" else f"{name}.grad"
        if parameter is None:
            layout = layout_of(case, name, self.said[name])
            shape = window(self.shapes[name], layout, case.mesh, self.rank).shape
            dtype = (case.format if case.update == "sharded" else case.gradient_format).torch_dtype
            self.tensors[what] = local_tensor(what, torch.zeros(shape, dtype=dtype))
            return
        if case.update == "sharded":
            self.tensors[what] = local_tensor(what, parameter.local())
            return
        tensor = parameter.tensor
        with phase(f"reading {what}"):
            if self.gpt.read_grad is not None:
                found = self.gpt.read_grad(tensor)
            else:
                found = getattr(tensor, "main_grad", None) if case.main_grad else tensor.grad
        self.tensors[what] = None if found is None else local_tensor(what, parameter.gradient(what, found))
