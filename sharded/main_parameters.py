"""Main parameters: the fp32 masters of a model's parameters, their state, and the gradients that they step with.

Either every data-parallel rank keeps all of its own, or they are cut over these ranks, as in
`sharded.sharded_optimizer`. Both offer the same, so that what is done between reduction and update is the same too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sharded.clip import Held
from sharded.saved_state import SavedState, require_fits
from sharded.sharded_optimizer import MASTER, ShardedOptimizer
from sharded.updates import Rule

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that this rank holds, by name, and how they are updated. Their `Held` says on which other ranks they
    lie."""

    rule: Rule
    parameters: Mapping[str, Held]


class MainParameters(Protocol):
    """The masters of one group of parameters."""

    def reduce(self) -> list[Held]:
        """The mean of the gradients over the data-parallel ranks, in fp32, in ``grad`` of what is returned; to be
        changed in place."""

    def apply(self, rule: Rule) -> None:
        """Updates masters and state by these gradients, and copies the masters to the model."""

    def refresh(self) -> None:
        """Makes the masters anew from the model's parameters."""

    def owned(self) -> dict[str, tuple[int, int]]:
        """Of each parameter, the range (start, stop) of its elements that are kept here."""

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """What is kept for these elements, ``master`` among it where the model's parameter is not in fp32."""

    def save(self) -> SavedState:
        """The whole state, alike on every data-parallel rank."""

    def require_own(self, saved: Mapping[str, Any]) -> None:
        """Raises ValueError for a state of something else."""

    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes over a state; raises as `require_own`, before anything is changed."""


def main_parameters(group: ParameterGroup, data: ProcessGroup, sharded: bool) -> MainParameters:
    """Cut over the ranks of ``data`` where sharded."""
    elements = sum(held.parameter.numel() for held in group.parameters.values())
    # Where tensor-parallel ranks outnumber elements, some have none, and nothing to cut.
    return Cut(group, data) if sharded and elements else Replicated(group, data)


def own_gradient(p: torch.Tensor) -> torch.Tensor:
    """This rank's gradient of a parameter: ``main_grad`` where there is one, else ``grad``, else zeros."""
    main = getattr(p, "main_grad", None)
    gradient = p.grad if main is None else main
    return torch.zeros_like(p) if gradient is None else gradient


class Replicated:
    """Every data-parallel rank keeps all masters of its parameters, and makes the same steps."""

    def __init__(self, group: ParameterGroup, data: ProcessGroup) -> None:
        self.rule, self._data, self._held = group.rule, data, dict(group.parameters)
        # A parameter in fp32 is its own master.
        self._main = {name: one.parameter.detach().float() for name, one in self._held.items()}
        self._state = {
            name: {kind: torch.zeros_like(main) for kind in self.rule.states} for name, main in self._main.items()
        }
        self._steps = 0

    def reduce(self) -> list[Held]:
        flat = torch.cat([own_gradient(one.parameter).detach().float().view(-1) for one in self._held.values()])
        flat = averaged(flat, self._data)
        pieces = flat.split_with_sizes([main.numel() for main in self._main.values()])
        for main, piece in zip(self._main.values(), pieces, strict=True):
            main.grad = piece.view(main.shape)
        return [replace(one, parameter=self._main[name]) for name, one in self._held.items()]

    def apply(self, rule: Rule) -> None:
        self._steps += 1
        for name, main in self._main.items():
            gradient, main.grad = main.grad, None
            assert gradient is not None
            rule.update(main, gradient, self._state[name], self._steps)
        self._hand_out()

    def _hand_out(self) -> None:
        for name, main in self._main.items():
            self._held[name].parameter.detach().copy_(main)

    def refresh(self) -> None:
        for name, main in self._main.items():
            main.copy_(self._held[name].parameter.detach())

    def owned(self) -> dict[str, tuple[int, int]]:
        return {name: (0, main.numel()) for name, main in self._main.items()}

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        return {name: {kind: x.clone().view(-1) for kind, x in self._kept(name).items()} for name in self._main}

    def _kept(self, name: str) -> dict[str, torch.Tensor]:
        low = self._held[name].parameter.dtype != torch.float32
        return {**self._state[name], MASTER: self._main[name]} if low else self._state[name]

    def save(self) -> SavedState:
        return {
            "rule": type(self.rule).__name__,
            "steps": self._steps,
            "owners": 1,
            "shapes": {name: tuple(main.shape) for name, main in self._main.items()},
            "parameters": {name: {k: x.clone() for k, x in self._kept(name).items()} for name in self._main},
        }

    def require_own(self, saved: Mapping[str, Any]) -> None:
        due = {name: (tuple(main.shape), tuple(self._kept(name))) for name, main in self._main.items()}
        require_fits(saved, type(self.rule).__name__, due)

    def load(self, saved: Mapping[str, Any]) -> None:
        self.require_own(saved)
        for name in self._main:
            for kind, tensor in self._kept(name).items():
                tensor.copy_(saved["parameters"][name][kind])
        self._steps = saved["steps"]


class Cut(ShardedOptimizer):
    """Masters and state are cut over the data-parallel ranks."""

    def __init__(self, group: ParameterGroup, data: ProcessGroup) -> None:
        self._held = dict(group.parameters)
        named = [(name, one.parameter) for name, one in self._held.items()]
        super().__init__(named, data, group.rule, reduce_dtype=torch.float32, master_weights=True)
        self._gradients: list[torch.Tensor] = []

    def _local(self, p: torch.Tensor) -> torch.Tensor:
        return own_gradient(p)

    def reduce(self) -> list[Held]:
        self._gradients = [self._reduced(buffer) for buffer in self._buffers]
        parts = []
        for buffer, flat in zip(self._buffers, self._gradients, strict=True):
            at = 0
            for name, (start, stop) in zip(buffer.parameters, buffer.cut.owned(self.group.rank()), strict=True):
                part = torch.empty_like(flat[at : at + stop - start])
                part.grad = flat[at : at + stop - start]
                # Each rank has other elements of it, whoever holds the parameter.
                alike = {axis: group for axis, group in self._held[name].alike.items() if group != self.group}
                parts.append(replace(self._held[name], parameter=part, alike=alike))
                at += stop - start
        return parts

    @torch.no_grad()
    def apply(self, rule: Rule) -> None:
        self.rule = rule
        self._steps += 1
        for buffer, gradient in zip(self._buffers, self._gradients, strict=True):
            self._apply(buffer, gradient)
        self._gradients = []

    def refresh(self) -> None:
        for buffer in self._buffers:
            if MASTER in buffer.state:
                buffer.state[MASTER].copy_(self._values(buffer))


def averaged(flat: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The mean over the ranks of a group, [elements]."""
    if group.size() > 1 and flat.numel():
        flat = flat / group.size()
        dist.all_reduce(flat, group=group)
    return flat
