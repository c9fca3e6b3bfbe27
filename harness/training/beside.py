"""The training on one process, step by step, with its disturbed runs beside it.

It never sees the ranks' numbers, and of their decisions only those that rounding may have made.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from harness.oracle.deviation import RUNS, measure
from harness.oracle.noise import overflows_above
from harness.oracle.rounding import repeatable
from harness.oracle.shadows import NumbersStayInside, Shadows
from harness.oracle.statistics import Expected
from harness.oracle.within import Limits
from harness.properties.modules import one_thread
from reference.gpt_parameters import tensors
from reference.largest import Largest
from reference.loss_scale import after, begin
from reference.mixed_precision_steps import Planned
from reference.train_step import TrainStepCase
from reference.train_step_expected import Model, largest_of


@dataclass(frozen=True, eq=False)
class Step:
    """What one process makes of a step. planned: what must be decided. decided: whether it was so without the ranks.
    values: loss, and where the step was made norm and coefficient, by name, each [1]."""

    planned: Planned
    decided: bool
    values: Mapping[str, Expected]


class Beside:
    """The training of a case on one process."""

    def __init__(self, case: TrainStepCase, runs: int = RUNS, seed: int = 0) -> None:
        self.case, self.runs, self.t = case, runs, 0
        self.state = begin(case.scaling)
        self._model = Model.of(case, tensors(case.model))
        self._shadows = Shadows(case.model.format, seed, runs)

    def step(self, step: int, followed: bool | None) -> Step:
        """The next step. followed: whether the ranks skipped it, which is believed where rounding decides; None where
        they are not believed any more."""
        case, shadows = self.case, self._shadows
        largest = largest_of(case) if case.dtype == "fp16" else None
        with one_thread(), repeatable(step), largest or nullcontext(), NumbersStayInside(shadows), shadows:
            gradients, loss = self._model.gradients(step, self.state.scale)
        overflow = False if largest is None else self._overflows(largest, gradients)
        skipped = overflow if overflow is not None else bool(followed)
        planned = Planned(self.state.scale, skipped, after(case.scaling, self.state, skipped), self.t)
        found = {"loss": loss}
        if not skipped:
            with one_thread(), repeatable(step), NumbersStayInside(shadows), shadows:
                found |= self._model.step(gradients, planned)
            if case.dtype != "fp32":
                self._store()
        values = {f"{name}[{step}]": self._expected(one) for name, one in found.items()}
        self.state, self.t = planned.after, self.t + (not skipped)
        del gradients, loss, found
        shadows.forget()
        return Step(planned, overflow is not None, values)

    def _store(self) -> None:
        """Rounds the masters to the model's weights, really, and those of each disturbed run by themselves.

        The updates of a warm-up are less than half a unit in the last place of many weights, which then stay as they
        are: an error that leans against the gradient, with all its elements, as no disturbance by chance does.
        """
        fmt, model = self.case.model.format, self._model
        for name, master in model.masters.items():
            model.values[name] = value = master.to(fmt.torch_dtype).to(torch.float64)
            copies = self._shadows.of(master)
            if copies is not None:
                self._shadows.keep(value, copies.to(fmt.torch_dtype).to(torch.float64))

    def _overflows(self, largest: Largest, gradients: Mapping[str, torch.Tensor]) -> bool | None:
        """Whether the gradients do in fp16; None where rounding decides, or the order of a sum.

        They do where some rank's own gradient is beyond the largest number by more than rounding moves it, also where
        ranks have shares that add up to the gradient and not such as have it for their mean; and do not where nothing
        on the way comes near it, in any order of its sums.
        """
        limit = overflows_above(self.case.model.format)
        surely = 0.0
        for gradient in gradients.values():
            copies = self._shadows.of(gradient)
            spread = 0.0 if copies is None else (copies - gradient).abs().amax(0) * Limits().worst
            surely = max(surely, float((gradient.abs() - spread).max()))
        if surely / self.case.ranks_of_data > self.case.model.format.largest:
            return True
        return False if largest.reached(self.case.model.tied) < limit else None

    def _expected(self, value: torch.Tensor) -> Expected:
        found = measure(value, self._shadows.of(value), self.runs)
        arrays = (found.want, found.deviation, found.residuals, found.ambiguous)
        want, tolerance, residuals, ambiguous = (tensor.detach().numpy() for tensor in arrays)
        smallest = self.case.model.format.smallest_normal
        return Expected(want, tolerance, residuals, ambiguous, smallest_normal=smallest)
