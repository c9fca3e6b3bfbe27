"""Loss scaling: the case as data, and the transition function that says what every step makes of the scale.

Dynamic loss scaling (Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2): a step whose
gradients have an infinity or a NaN is skipped, and the scale backs off; after enough good steps in a row it grows.
*Hysteresis* bears some overflows before the scale backs off; what is left of it is replenished when the scale grows, or
by every good step. All scales are whole multiples of a power of two that fp32 holds, so that nothing rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from reference.mesh import AXES, Mesh
from reference.traffic import Transfer, worth_sending

Kind = Literal["dynamic", "constant"]
Replenish = Literal["growth", "good"]
What = Literal["good", "overflow", "save", "load", "fresh", "relaunch", "interval"]
Value = Literal["inf", "-inf", "nan"]

#: The largest scale: that of fp32, in which libraries keep it.
LARGEST = float(np.finfo(np.float32).max)

#: The formats of gradients.
GRADIENTS = ("fp32", "bf16", "fp16")

#: What a scaler must refuse, by the field and its value; a state is made from a scaler of another configuration, or is
#: cut short.
OF_CONFIGURATION: dict[str, tuple[str, float]] = {
    "initial_zero": ("initial", 0.0),
    "initial_negative": ("initial", -1.0),
    "initial_nan": ("initial", math.nan),
    "growth_factor_zero": ("growth_factor", 0.0),
    "growth_factor_negative": ("growth_factor", -2.0),
    "growth_factor_below_one": ("growth_factor", 0.5),
    "growth_interval_zero": ("growth_interval", 0),
    "growth_interval_negative": ("growth_interval", -1),
    "backoff_factor_zero": ("backoff_factor", 0.0),
    "backoff_factor_negative": ("backoff_factor", -0.5),
    "backoff_factor_above_one": ("backoff_factor", 2.0),
    "hysteresis_zero": ("hysteresis", 0),
    "minimum_negative": ("minimum", -1.0),
    "minimum_above_initial": ("minimum", math.inf),
}
#: By the field in which the configuration is another.
OF_STATE = {
    "state_initial": "initial",
    "state_growth_factor": "growth_factor",
    "state_backoff_factor": "backoff_factor",
    "state_hysteresis": "hysteresis",
    "state_replenish": "replenish",
    "state_minimum": "minimum",
    "state_truncated": "",
}
Invalid = Literal[
    "initial_zero", "initial_negative", "initial_nan", "growth_factor_zero", "growth_factor_negative",
    "growth_factor_below_one", "growth_interval_zero", "growth_interval_negative", "backoff_factor_zero",
    "backoff_factor_negative", "backoff_factor_above_one", "hysteresis_zero", "minimum_negative",
    "minimum_above_initial", "state_initial", "state_growth_factor", "state_backoff_factor", "state_hysteresis",
    "state_replenish", "state_minimum", "state_truncated",
]  # fmt: skip


@dataclass(frozen=True)
class Scaling:
    """How a scale moves.

    kind: ``constant`` never moves. initial: the first scale. growth_factor: by which it grows after
    ``growth_interval`` good steps in a row. backoff_factor: by which it shrinks at an overflow, but for the first
    ``hysteresis`` - 1 of them. replenish: when these are given again: as the scale grows (``growth``), or by each
    ``good`` step. minimum: below which it does not back off, 0 for none.
    """

    kind: Kind = "dynamic"
    initial: float = 8.0
    growth_factor: float = 2.0
    growth_interval: int = 2
    backoff_factor: float = 0.5
    hysteresis: int = 1
    replenish: Replenish = "growth"
    minimum: float = 0.0

    def require_valid(self) -> None:
        """Raises ValueError for what no scaler can work with."""
        if self.kind not in get_args(Kind) or self.replenish not in get_args(Replenish):
            raise ValueError(
                f"kind is {self.kind!r} and replenish {self.replenish!r}: expected one of {', '.join(get_args(Kind))}, "
                f"and one of {', '.join(get_args(Replenish))}"
            )
        if not 0 < self.initial <= LARGEST:
            raise ValueError(f"initial is {self.initial}: expected above 0 and at most {LARGEST}")
        if not 1 < self.growth_factor < math.inf or not 0 < self.backoff_factor < 1:
            raise ValueError(
                f"growth_factor is {self.growth_factor} and backoff_factor {self.backoff_factor}: expected one above 1 "
                "and one between 0 and 1"
            )
        if self.growth_interval < 1 or self.hysteresis < 1:
            raise ValueError(
                f"growth_interval is {self.growth_interval} and hysteresis {self.hysteresis}: expected at least 1"
            )
        if not 0 <= self.minimum <= self.initial:
            raise ValueError(f"minimum is {self.minimum}: expected from 0 to the initial scale, {self.initial}")


@dataclass(frozen=True)
class ScalerState:
    """scale: of the next step. good: good steps in a row since the scale grew or overflowed. left: overflows until it
    backs off, of which the last one does; 0 where each does."""

    scale: float
    good: int
    left: int


def begin(scaling: Scaling) -> ScalerState:
    """The state before the first step."""
    return ScalerState(scaling.initial, 0, scaling.hysteresis)


def after(scaling: Scaling, state: ScalerState, overflow: bool) -> ScalerState:
    """The state after a step. An overflow skips the step, whatever the scaler makes of it.

    A scale that would grow beyond the largest number of fp32 stays.
    """
    if scaling.kind == "constant":
        return state
    if overflow:
        left = max(0, state.left - 1)
        backed_off = max(state.scale * scaling.backoff_factor, scaling.minimum)
        return ScalerState(state.scale if left else backed_off, 0, left)
    good = state.good + 1
    grows = good >= scaling.growth_interval
    grown = state.scale * scaling.growth_factor
    return ScalerState(
        scale=grown if grows and grown <= LARGEST else state.scale,
        good=0 if grows else good,
        left=scaling.hysteresis if grows or scaling.replenish == "good" else state.left,
    )


@dataclass(frozen=True)
class Event:
    """One thing that happens.

    what: a ``good`` step or one with an ``overflow``; the state is ``save``d, ``load``ed into the same scaler, into a
    ``fresh`` one, or into that of new processes, which go on (``relaunch``); the growth ``interval`` changes. value:
    what overflow leaves, at the ranks whose coordinate along ``axes`` is ``at``, modulo their number: on all of them
    without axes. interval: the new one.
    """

    what: What = "good"
    value: Value = "inf"
    axes: tuple[str, ...] = ()
    at: int = 0
    interval: int = 1

    def __post_init__(self) -> None:
        if self.what not in get_args(What) or self.value not in get_args(Value):
            raise ValueError(f"an event {self.what!r} of {self.value!r}: expected {get_args(What)}, {get_args(Value)}")
        if self.at < 0 or self.interval < 1 or set(self.axes) - set(AXES):
            raise ValueError(f"{self}: expected at from 0, an interval from 1, and axes of {', '.join(AXES)}")

    @property
    def is_step(self) -> bool:
        return self.what in ("good", "overflow")

    def hits(self, mesh: Mesh, rank: int) -> bool:
        """Whether this rank's own gradients overflow."""
        if self.what != "overflow":
            return False
        return mesh.coordinate(rank, self.axes) == self.at % mesh.axis_size(self.axes)


@dataclass(frozen=True)
class LossScaleCase:
    """Steps of a loss scaler. agree: the scaler makes the ranks agree, over all axes of the mesh, so that an overflow
    may be on some of them only. gradients: the format of those that it looks at. invalid: what must be refused: a
    value, or a state, which is then loaded last."""

    mesh: Mesh
    events: tuple[Event, ...] = (Event(),)
    scaling: Scaling = Scaling()
    agree: bool = False
    gradients: str = "fp32"
    invalid: Invalid | None = None

    def __post_init__(self) -> None:
        self.scaling.require_valid()
        if self.invalid not in (None, *get_args(Invalid)):
            raise ValueError(f"invalid is {self.invalid!r}: expected one of {', '.join(get_args(Invalid))}")
        if self.gradients not in GRADIENTS:
            raise ValueError(f"gradients is {self.gradients!r}: expected one of {', '.join(GRADIENTS)}")
        if [event.what for event in self.events].count("relaunch") > 1:
            raise ValueError("several events relaunch: expected one, after which new processes go on to the end")
        if not self.has(self.invalid):
            raise ValueError(f"invalid is {self.invalid!r}: a {self.scaling.kind} scale has no such thing")
        for event in self.events:
            if event.axes and not self.agree:
                raise ValueError("an overflow on some ranks only: expected agree")
            if set(event.axes) - set(self.mesh.names):
                raise ValueError(f"an overflow along {event.axes}: expected axes of the mesh {self.mesh}")
        if self.scaling.kind == "constant" and any(event.what == "interval" for event in self.events):
            raise ValueError("a constant scale has no interval to change")
        for step in expected(self):
            if step.state.scale != float(np.float32(step.state.scale)):
                raise ValueError(f"a scale of {step.state.scale!r} is not exact in fp32: expected simpler factors")

    def has(self, invalid: str | None) -> bool:
        """Whether there is such a thing to be wrong. A constant scale is its initial one; a dynamic one moves."""
        if invalid is None or invalid == "state_truncated":
            return True
        if self.scaling.kind == "constant":
            return invalid.startswith(("initial", "state_initial"))
        return invalid != "state_initial"

    @property
    def relaunched(self) -> int | None:
        """The number of the event with which new processes go on; None where none do. What is refused is no run."""
        found = [number for number, event in enumerate(self.events) if event.what == "relaunch"]
        return found[0] if found and self.invalid is None else None

    @property
    def asked(self) -> Scaling:
        """The configuration that a candidate is asked for: in a case that must be refused, not a valid one."""
        if self.invalid not in OF_CONFIGURATION:
            return self.scaling
        field, value = OF_CONFIGURATION[self.invalid]
        change: dict[str, Any] = {field: 2 * self.scaling.initial if value == math.inf else value}
        return replace(self.scaling, **change)

    @property
    def other(self) -> Scaling:
        """Another configuration, whose state must be refused."""
        now, field = self.scaling, OF_STATE[str(self.invalid)]
        change: dict[str, Any] = {
            "initial": now.initial / 2,
            "growth_factor": 2 * now.growth_factor,
            "backoff_factor": now.backoff_factor / 2,
            "hysteresis": now.hysteresis + 1,
            "replenish": "good" if now.replenish == "growth" else "growth",
            "minimum": 0.0 if now.minimum else now.initial / 2,
        }
        return replace(now, **{field: change[field]})


@dataclass(frozen=True)
class Step:
    """After an event: whether it was a step that is skipped, and the state."""

    skipped: bool
    state: ScalerState


def expected(case: LossScaleCase) -> tuple[Step, ...]:
    """What holds after each event, on every rank."""
    return tuple(_steps(case))


def _steps(case: LossScaleCase) -> Iterator[Step]:
    # The interval may change, so it is saved and loaded with the rest.
    scaling = saved_scaling = case.scaling
    state = saved = begin(scaling)
    for event in case.events:
        skipped = False
        if event.is_step:
            skipped = event.what == "overflow"  # which hits some rank always
            state = after(scaling, state, skipped)
        elif event.what == "save":
            saved, saved_scaling = state, scaling
        elif event.what == "interval":
            scaling = replace(scaling, growth_interval=event.interval)
        else:
            state, scaling = saved, saved_scaling
        yield Step(skipped, state)


def needed(case: LossScaleCase) -> tuple[Transfer, ...]:
    """One maximum over each axis in every step, where ranks must agree."""
    if not case.agree:
        return ()
    steps = [i for i, event in enumerate(case.events) if event.is_step]
    due = [Transfer("finish", i, "all_reduce", axis, 1, "float32") for i in steps for axis in case.mesh.names]
    return worth_sending(due, case.mesh)
