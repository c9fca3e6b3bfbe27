"""A mixed-precision optimizer: parameters in bf16 or fp16, masters and state in fp32, and a loss that is scaled.

A step reduces the gradients, divides them by the scale, looks whether any overflowed, clips them, updates the masters,
and copies these to the model (Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740). Whether to skip it,
all ranks agree before anything changes: a step that one of them skips alone leaves a model of no process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed import ProcessGroup

from sharded.clip import Held, clip_gradients, multiply, require_clipping
from sharded.loss_scale import ConstantLossScaler, agreed, has_overflow
from sharded.main_parameters import DTYPES, ParameterGroup, main_parameters


@dataclass(frozen=True)
class Stepped:
    """What a step did. norm: of the gradients without the scale, before clipping; coefficient: by which they were
    multiplied; both None where nothing was clipped."""

    skipped: bool
    norm: float | None = None
    coefficient: float | None = None


class MixedPrecisionOptimizer:
    """Updates parameters by gradients of a loss that was multiplied by ``scaler.scale``.

    Call `step` on every rank after backward, with each rank's own gradients in ``grad``, or in ``main_grad``: it
    reduces them over ``data``. A parameter without a gradient on a rank has zeros there. Gradients of tied copies must
    be summed already.

    groups: the parameters of this rank that train; the ranks of ``data`` hold the same. Those that other ranks hold
    too, such as copies of a tied weight, need groups of their own: in one buffer their places, which differ, would
    decide in which order gradients are added. scaler: agrees with nobody by itself. axes: the groups, by axis, over
    which ranks agree, and over which norms are summed; together they must reach every rank. limit: of the global
    2-norm, None for none; eps: is added to the norm before the limit is divided by it. schedule: by what learning
    rates are multiplied in the t-th step, from 0, that is not skipped. sharded: masters and state are cut over
    ``data``.

    Raises ValueError for parameters in another dtype than fp32, bf16 and fp16, for one that is there twice, for options
    of a rule without sense, such as a negative learning rate, and for a limit that is not above 0.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        scaler: ConstantLossScaler,
        data: ProcessGroup,
        *,
        axes: Mapping[str, ProcessGroup],
        limit: float | None = None,
        eps: float = 0.0,
        schedule: Callable[[int], float] = lambda t: 1.0,
        sharded: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        _require_valid(groups)
        require_clipping(1.0 if limit is None else limit, eps)
        self.scaler, self._axes, self._device = scaler, dict(axes), device
        self._limit, self._eps, self._schedule = limit, eps, schedule
        self._rules = [group.rule for group in groups if group.parameters]
        self._main = [main_parameters(group, data, sharded) for group in groups if group.parameters]
        self.steps = 0

    def step(self) -> Stepped:
        """One step, or none where a gradient overflowed on any rank: the same on all, which must all call it."""
        held = self._reduced()
        self._unscale(held)
        if self._is_to_be_skipped(held):
            return Stepped(skipped=True)
        norm, coefficient = self._clip(held)
        self._update()
        return Stepped(False, norm, coefficient)

    def _reduced(self) -> list[Held]:
        return [held for main in self._main for held in main.reduce()]

    def _unscale(self, held: Sequence[Held]) -> None:
        multiply(held, 1 / self.scaler.scale)

    def _is_to_be_skipped(self, held: Sequence[Held]) -> bool:
        """Agreed; the scale moves."""
        found = has_overflow(one.parameter.grad for one in held)
        return self.scaler.update(self._agreed(found))

    def _agreed(self, found: bool) -> bool:
        return agreed(found, list(self._axes.values()), self._device)

    def _clip(self, held: Sequence[Held]) -> tuple[float | None, float | None]:
        if self._limit is None:
            return None, None
        done = clip_gradients(held, self._limit, groups=self._axes, eps=self._eps, device=self._device)
        return done.norm, done.coefficient

    @torch.no_grad()
    def _update(self) -> None:
        factor = self._schedule(self.steps)
        for rule, main in zip(self._rules, self._main, strict=True):
            main.apply(replace(rule, lr=rule.lr * factor))
        self.steps += 1

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes the masters anew from the model: to be called after weights alone were loaded into it."""
        for main in self._main:
            main.refresh()

    def owned(self, name: str) -> tuple[int, int]:
        """The range (start, stop) of a parameter's elements whose master and state this rank keeps."""
        return next(main.owned()[name] for main in self._main if name in main.owned())

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """What is kept for these elements, by name, ``master`` among it where the parameter is not in fp32."""
        return next(main.state()[name] for main in self._main if name in main.owned())

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """`state` of every parameter of this rank, by its name."""
        return {name: kept for main in self._main for name, kept in main.state().items()}

    def save(self) -> dict[str, Any]:
        """The whole state of the parameters that this rank holds. Every rank must call it."""
        return {"scaler": self.scaler.save(), "groups": [main.save() for main in self._main], "steps": self.steps}

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes over a state; the model's parameters are not touched.

        Raises ValueError, and changes nothing, where it was saved by another configuration, or something of it is
        missing. Which, the message says.
        """
        if not isinstance(saved, Mapping):
            raise ValueError(f"this is no saved state, but {type(saved).__name__}: pass what save() returned")
        missing = [key for key in ("scaler", "groups", "steps") if key not in saved]
        if missing:
            raise ValueError(f"the state has no {', '.join(missing)}: it is cut short; pass what save() returned")
        groups, steps = saved["groups"], saved["steps"]
        if not isinstance(groups, Sequence) or not isinstance(steps, int) or steps < 0:
            raise ValueError(
                f"the state has groups {type(groups).__name__} and has made {steps!r} steps: expected a list, and a "
                "whole number from 0; pass what save() returned"
            )
        if len(groups) != len(self._main):
            raise ValueError(
                f"the state is of {len(groups)} groups of parameters, and here are {len(self._main)}: build "
                "the optimizer that was saved"
            )
        for main, one in zip(self._main, groups, strict=True):
            main.require_own(one)
        self.scaler.load(saved["scaler"])  # which takes all or nothing
        for main, one in zip(self._main, groups, strict=True):
            main.load(one)
        self.steps = steps


def _require_valid(groups: Sequence[ParameterGroup]) -> None:
    names: dict[str, int] = {}
    numbers: dict[int, str] = {}
    for number, group in enumerate(groups):
        group.rule.require_valid()
        for name, one in group.parameters.items():
            if names.setdefault(name, number) != number:
                raise ValueError(f"parameter {name!r} is in two groups: expected each name once")
            other = numbers.setdefault(id(one.parameter), name)
            if other != name:
                raise ValueError(f"{other!r} and {name!r} are one parameter, which would step twice: name it once")
            if one.parameter.dtype not in DTYPES:
                known = ", ".join(map(str, DTYPES))
                raise ValueError(f"parameter {name!r} is in {one.parameter.dtype}: expected one of {known}")
