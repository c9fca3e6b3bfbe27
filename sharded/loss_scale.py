"""Loss scaling: the scale of the loss in fp16 training, and whether a step is valid, agreed by all ranks.

A step is skipped on every rank where any rank's gradients have an infinity or a NaN: ranks must agree before any of
them changes something, the scale included. They do so by one maximum over each of the groups that were given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

REPLENISH = ("growth", "good")
_LARGEST = float(torch.finfo(torch.float32).max)
_IN_RANGE = f"above 0 and at most {_LARGEST:g}, the largest of fp32"


def has_overflow(gradients: Iterable[torch.Tensor | None]) -> bool:
    """Whether any of this rank's gradients has an infinity or a NaN."""
    return not all(bool(torch.isfinite(g).all()) for g in gradients if g is not None)


def agreed(found: bool, groups: Sequence[ProcessGroup], device: torch.device | str = "cpu") -> bool:
    """Whether any rank found something: one maximum of one element over each group that has several ranks. Every rank
    of the groups must call it, with the same groups in the same order."""
    flag = torch.tensor([float(found)], dtype=torch.float32, device=device)
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag.item() > 0)


class ConstantLossScaler:
    """A scale that never moves. Steps with an overflow are skipped all the same.

    scale: above 0. groups: over which ranks agree, such as those along tp, pp and dp; none where the caller's flag is
    agreed already. device: of the flag that is sent.

    Raises ValueError where the scale is not above 0 and finite.
    """

    def __init__(
        self, scale: float, *, groups: Sequence[ProcessGroup] = (), device: torch.device | str = "cpu"
    ) -> None:
        _require(0 < as_float(scale) <= _LARGEST, "scale", scale, _IN_RANGE)
        self.scale = float(scale)
        self._groups, self._device = tuple(groups), device

    def update(self, found_inf: bool) -> bool:
        """After the gradients of a step: whether it is to be skipped, the same on every rank.

        found_inf: whether this rank's own gradients have an infinity or a NaN, see `has_overflow`.
        """
        return agreed(found_inf, self._groups, self._device)

    def configuration(self) -> dict[str, Any]:
        """What must agree between the scaler that saves a state and the one that loads it."""
        return {"kind": "constant", "scale": self.scale}

    def state(self) -> dict[str, Any]:
        """What moves: nothing here."""
        return {}

    def save(self) -> dict[str, Any]:
        """The configuration and the state, as plain data."""
        return {"configuration": self.configuration(), "state": self.state()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes over a state.

        Raises ValueError, and changes nothing, where it was saved by a scaler of another configuration, or something
        of it is missing. Which, the message says.
        """
        self._take(_checked(saved, self.configuration(), self.state()))

    def _take(self, state: Mapping[str, Any]) -> None:
        """Of a constant scale there is nothing to take over."""


class DynamicLossScaler(ConstantLossScaler):
    """A scale that backs off where gradients overflow, and grows after enough good steps.

    initial: the first scale. growth_factor: above 1, by which it grows after ``growth_interval`` good steps in a row;
    beyond the largest number of fp32 it stays. backoff_factor: between 0 and 1, by which it shrinks at an overflow, but
    for the first ``hysteresis`` - 1 overflows. replenish: when these are given again: as the scale grows (``growth``),
    or by each ``good`` step, so that only overflows in a row count. minimum: below which it does not back off.

    Raises ValueError for a value outside of this.
    """

    def __init__(
        self,
        initial: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        backoff_factor: float = 0.5,
        hysteresis: int = 1,
        replenish: str = "growth",
        minimum: float = 0.0,
        groups: Sequence[ProcessGroup] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        _require(0 < as_float(initial) <= _LARGEST, "initial", initial, _IN_RANGE)
        _require(1 < as_float(growth_factor) < math.inf, "growth_factor", growth_factor, "a number above 1")
        _require(0 < as_float(backoff_factor) < 1, "backoff_factor", backoff_factor, "a number between 0 and 1")
        _require_whole("hysteresis", hysteresis, 1, ", which bears no overflow")
        _require(replenish in REPLENISH, "replenish", replenish, f"one of {', '.join(REPLENISH)}")
        _require(
            0 <= as_float(minimum) <= initial, "minimum", minimum, f"from 0, for none, to the initial scale, {initial}"
        )
        super().__init__(initial, groups=groups, device=device)
        self._growth_factor, self._backoff_factor = float(growth_factor), float(backoff_factor)
        self._hysteresis, self._replenish, self._minimum = hysteresis, replenish, float(minimum)
        self.set_growth_interval(growth_interval)
        self._good, self._left = 0, self._hysteresis

    def set_growth_interval(self, interval: int) -> None:
        """From now on the scale grows after so many good steps in a row, of which those since its last change count.

        Raises ValueError where it is below 1.
        """
        _require_whole("growth_interval", interval, 1)
        self._interval = interval

    def update(self, found_inf: bool) -> bool:
        skipped = super().update(found_inf)
        if skipped:
            self._overflowed()
        else:
            self._went_well()
        return skipped

    def _overflowed(self) -> None:
        self._good = 0
        self._left = max(self._left - 1, 0)
        if self._left == 0:
            self._back_off()

    def _back_off(self) -> None:
        self.scale = max(self._minimum, self.scale * self._backoff_factor)

    def _went_well(self) -> None:
        self._good += 1
        if self._replenish == "good":
            self._left = self._hysteresis
        if self._is_due():
            self._grow()

    def _is_due(self) -> bool:
        return self._good >= self._interval

    def _grow(self) -> None:
        self._good, self._left = 0, self._hysteresis
        if self.scale * self._growth_factor <= _LARGEST:
            self.scale *= self._growth_factor

    def configuration(self) -> dict[str, Any]:
        return {
            "kind": "dynamic",
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "hysteresis": self._hysteresis,
            "replenish": self._replenish,
            "minimum": self._minimum,
        }

    def state(self) -> dict[str, Any]:
        """scale: of the next step. good: good steps in a row. left: overflows until it backs off. interval: which may
        have been changed."""
        return {"scale": self.scale, "good": self._good, "left": self._left, "interval": self._interval}

    def _take(self, state: Mapping[str, Any]) -> None:
        self.scale, self._good = state["scale"], state["good"]
        self._left, self._interval = state["left"], state["interval"]


def _checked(saved: Mapping[str, Any], due: Mapping[str, Any], state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state that was saved. due: the configuration expected; state: what a state has."""
    parts: list[Any] = [saved.get(key) for key in ("configuration", "state")] if isinstance(saved, Mapping) else []
    if not parts or not all(isinstance(part, Mapping) for part in parts):
        raise ValueError("this is no saved state of a loss scaler: pass what save() returned")
    configuration: Mapping[str, Any] = parts[0]
    found: Mapping[str, Any] = parts[1]
    for name, value in due.items():
        other = configuration.get(name, "missing")
        if other != value:
            raise ValueError(
                f"the state was saved with {name} {other}, and here it is {value}: build the scaler that was saved"
            )
    missing = [name for name in state if name not in found]
    if missing:
        raise ValueError(f"the state has no {', '.join(missing)}: it is cut short; pass what save() returned")
    for name in state:
        if name == "scale":
            _require(0 < as_float(found[name]) <= _LARGEST, f"the state's {name}", found[name], _IN_RANGE)
        else:
            least = int(name == "interval")
            _require_whole(f"the state's {name}", found[name], least)
    return found


def as_float(value: object) -> float:
    """NaN for what is no number, for which no comparison holds."""
    return float(value) if isinstance(value, float | int) and not isinstance(value, bool) else math.nan


def _require_whole(name: str, value: object, least: int, why: str = "") -> None:
    right = isinstance(value, int) and not isinstance(value, bool) and value >= least
    _require(right, name, value, f"a whole number, at least {least}{why}")


def _require(right: bool, name: str, value: object, expected: str) -> None:
    if not right:
        raise ValueError(f"{name} is {value!r}: expected {expected}")
