"""A trainer: a GPT on tensor-, pipeline- and data-parallel ranks, and its mixed-precision optimizer, step by step.

The loss of a step is multiplied by the loss scale. When its last backward is done, copies of a tied embedding are
summed over the pipeline, and what is partial over the tensor-parallel group; then the optimizer sums the data-parallel
ranks' gradients, agrees with all ranks whether the step is valid, and updates.

Collectives: those of `sharded.gpt_parallel` without its reduction; for each weight over the vocabulary, and for the
other parameters together, the reduction of the optimizer; and its two, or three, small ones over each axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sharded.clip import Held
from sharded.gpt_parallel import ParallelGPT
from sharded.loss_scale import ConstantLossScaler
from sharded.main_grad import buffer_of
from sharded.main_parameters import ParameterGroup
from sharded.mixed_precision import MixedPrecisionOptimizer, Stepped
from sharded.partial_gradients import is_cut, partial_copies
from sharded.updates import Rule


class Trainer:
    """Trains a model that was built with ``reduces=False``, whose ranks along its three groups are all that there are.

    rule: of the update, for all parameters. scaler: agrees with nobody by itself. limit, eps, schedule, sharded: as of
    `MixedPrecisionOptimizer`.

    Call `refresh` where parameters were changed from outside. Raises ValueError for a model that reduces by itself, and
    as MixedPrecisionOptimizer does.
    """

    def __init__(
        self,
        model: ParallelGPT,
        rule: Rule,
        scaler: ConstantLossScaler,
        *,
        limit: float | None = None,
        eps: float = 0.0,
        schedule: Callable[[int], float] = lambda t: 1.0,
        sharded: bool = False,
    ) -> None:
        if model.reduces:
            raise ValueError("the model reduces its gradients by itself: build it with reduces=False")
        self.model, self.scaler = model, scaler
        self.parameters = distinct(model.named_parameters())
        groups = [ParameterGroup(rule, self._held(some)) for some in model.apart(list(self.parameters.items()))]
        self.optimizer = MixedPrecisionOptimizer(
            groups,
            scaler,
            model.data,
            axes={"tp": model.tensor, "pp": model.pipeline, "dp": model.data},
            limit=limit,
            eps=eps,
            schedule=schedule,
            sharded=sharded,
        )

    def step(
        self, ids: Sequence[torch.Tensor], targets: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor | None, Stepped]:
        """A step with a batch, given as in `ParallelGPT.step`: its loss, where that returns it, and what was done.
        Every rank must call it."""
        self._zero_gradients()
        loss = self.model.step(ids, targets, scale=self._loss_scale())
        return loss, self.optimizer.step()

    def _loss_scale(self) -> float:
        """The shares of the data-parallel ranks add up to the loss of the batch, and the optimizer takes the mean."""
        return self.scaler.scale * self.model.data.size()

    def _zero_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
            buffer = buffer_of(parameter)
            if buffer is not None:
                buffer.zero_()

    def _held(self, named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, Held]:
        """On which other ranks each parameter lies."""
        return {name: self._place(name, parameter) for name, parameter in named}

    def _place(self, name: str, parameter: nn.Parameter) -> Held:
        alike = {"dp": self.model.data}
        if not is_cut(parameter):
            alike["tp"] = self.model.tensor
        return Held(parameter, alike, copy=self._is_tied_copy(name) or self._is_shared_copy(parameter))

    def _is_tied_copy(self, name: str) -> bool:
        """Of a tied weight the embedding counts. Where that is also the output, it has no other name here."""
        return name == "output.weight" and self.model.tied

    def _is_shared_copy(self, parameter: nn.Parameter) -> bool:
        """Whether a neighbour before this rank holds the same piece."""
        return is_cut(parameter) and self.model.tensor.rank() % partial_copies(parameter) > 0

    def refresh(self) -> None:
        """Makes the masters anew from the parameters."""
        self.optimizer.refresh()

    def save(self) -> dict[str, Any]:
        """The parameters of this rank, all that is kept for them, and where its random streams are, alike on every
        data-parallel rank, for any number of these. Every rank must call it."""
        return {
            "parameters": {name: parameter.detach().clone() for name, parameter in self.parameters.items()},
            "random": self.model.random_states(),
            "optimizer": self.optimizer.save(),
        }

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes over what a rank of the same place along tensor and pipeline group saved.

        Raises ValueError, and changes nothing, where that was of another model or configuration, or something of it is
        missing.
        """
        missing = [key for key in ("parameters", "random", "optimizer") if key not in saved]
        if missing:
            raise ValueError(f"the state has no {', '.join(missing)}: it is cut short; pass what save() returned")
        due = {name: (tuple(p.shape), p.dtype) for name, p in self.parameters.items()}
        found = {name: (tuple(p.shape), p.dtype) for name, p in saved["parameters"].items()}
        for name in sorted({*due, *found}):
            if due.get(name) != found.get(name):
                raise ValueError(
                    f"parameter {name!r} is {found.get(name, 'missing')} in the state, and here it is "
                    f"{due.get(name, 'missing')}: build the model that was saved"
                )
        if set(saved["random"]) != set(self.model.numbers):
            raise ValueError(
                f"the state has random streams of the stages {sorted(saved['random'])}, and here are the stages "
                f"{list(self.model.numbers)}: build the model that was saved"
            )
        self.optimizer.load(saved["optimizer"])
        self.model.load_random_states(saved["random"])
        for name, parameter in self.parameters.items():
            parameter.copy_(saved["parameters"][name])


def distinct(named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Every parameter once, by its first name."""
    found: dict[str, nn.Parameter] = {}
    for name, parameter in named.items():
        if not any(parameter is other for other in found.values()):
            found[name] = parameter
    return found
