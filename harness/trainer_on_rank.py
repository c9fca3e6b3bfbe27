"""A trainer as a candidate has built it on this rank: its overflows put in, and all that it keeps read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.gpt_draws import Dropouts
from harness.gpt_steps import Running, layout_of
from harness.held import Held
from harness.local import local_tensor, require_like
from harness.mixed_precision_reading import Ranges, Read, ranges_of
from harness.mixed_precision_steps import OWNED
from harness.observation import LocalTensor, Observation
from harness.session import phase
from harness.train_step import Trainer
from reference.layout import Layout, window
from reference.train_step import TrainStepCase


@dataclass
class TrainerOnRank:
    """A trainer, its parameters on this rank, and the case that it is in."""

    case: TrainStepCase
    rank: int
    trainer: Trainer
    running: Running
    parameters: dict[str, Held]
    dropouts: Dropouts
    _step: int | None = None  # that is being made, or was last
    _hooked: bool = False

    def close(self) -> None:
        self._step = None  # who keeps hooks beyond a trainer may still call this one's
        if self.trainer.close is not None:
            with phase("close"):
                self.trainer.close()

    def hook(self, step: int) -> None:
        """Has the overflows of a step put into its gradients."""
        self._step, after_backward = step, self.trainer.after_backward
        if self.case.overflows and after_backward is not None and not self._hooked:
            self._hooked = True
            with phase("after_backward"):
                after_backward(self._overflow)

    def _overflow(self) -> None:
        for name, element, value in () if self._step is None else self.case.hits(self.rank, self._step):
            held = self.parameters[name]
            gradient = self._gradient(held.tensor)
            positions = torch.arange(gradient.numel()) if held.positions is None else held.positions.flatten()
            at = int(positions[element % positions.numel()])
            place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), gradient.shape))
            with torch.no_grad():
                gradient[place] = float(value)

    def _gradient(self, tensor: torch.Tensor) -> torch.Tensor:
        read = self.trainer.read_grad
        if read is not None:
            found = read(tensor)
        else:
            found = getattr(tensor, "main_grad", None) if self.case.model.main_grad else tensor.grad
        if found is None:
            found = tensor.grad = torch.zeros_like(tensor)
        return found

    def reading(self) -> Read:
        """Copies of this rank's parameters, and of masters and state of the elements that it keeps."""
        trainer, found = self.trainer, Read()
        for name, parameter in self.parameters.items():
            found[name] = parameter.local()
            kept = sum(max(0, stop - start) for start, stop in self.owned(name))
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

    def owned(self, name: str) -> Ranges:
        """The elements of a parameter whose master and state this rank keeps."""
        size = self.parameters[name].local().numel()
        return ((0, size),) if self.trainer.owned is None else ranges_of(name, self.trainer.owned, size)

    def kept(self, read: Read) -> Observation:
        """What was read, and who keeps which elements."""
        layouts = {name: layout_of(self.case.model, name, said) for name, said in self.running.said.items()}
        owned = {name: self.owned(name) for name in self.parameters}
        return Observation(self._tensors(read, layouts), layouts, facts={OWNED: owned})

    def _tensors(self, read: Read, layouts: dict[str, Layout]) -> dict[str, LocalTensor | None]:
        """All that is offered; of parameters on other stages, tensors without elements."""
        case, found = self.case, dict[str, LocalTensor | None]()
        by = {"master": self.trainer.master}
        offered = [kind for kind in case.kept if by.get(kind, self.trainer.state) is not None]
        for name, layout in layouts.items():
            shape = window(self.running.shapes[name], layout, case.mesh, self.rank).shape
            for what in (name, *(f"{name}.{kind}" for kind in offered)):
                own = read.get(what)
                dtype = case.model.format.torch_dtype if what == name else torch.float32
                found[what] = local_tensor(what, torch.zeros(shape, dtype=dtype) if own is None else own)
        return found
