"""The parts of a mixed-precision case: parameters, the groups that they belong to, and who overflows when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from reference.loss_scale import Event, Value

Kind = Literal["trained", "frozen", "some", "none", "first"]


@dataclass(frozen=True)
class MixedParameter:
    """One parameter, of ``size`` elements. kind: ``frozen`` does not train; ``some``: every second rank along dp, from
    the second on, has no gradient, which stands for zeros; ``none``: no rank has one; ``first``: in the first step
    alone. split: its elements are cut over tp. stage: which stage of the pipeline holds it, modulo their number. tied:
    the last one, or the first where that holds it, has a copy, with the same gradients. fp32: whatever the case's
    dtype. group: whose learning rate and weight decay it has, modulo their number."""

    size: int = 1
    kind: Kind = "trained"
    split: bool = False
    stage: int = 0
    tied: bool = False
    fp32: bool = False
    group: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.stage < 0 or self.group < 0 or self.kind not in get_args(Kind):
            raise ValueError(
                f"{self}: expected a size of at least 1, stage and group from 0, a kind of {', '.join(get_args(Kind))}"
            )


@dataclass(frozen=True)
class Group:
    """Parameters that share a learning rate, 0 for none, and a weight decay."""

    lr: float = 1.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Overflow:
    """An infinity or NaN in one gradient, in one step.

    It is on the ranks whose coordinate along ``axes`` is ``at``, modulo their number, or on all without axes; there at
    element ``element`` of gradient ``parameter``, both modulo the number of those that the rank has. A rank that has
    none is spared.
    """

    step: int = 0
    value: Value = "inf"
    axes: tuple[str, ...] = ()
    at: int = 0
    parameter: int = 0
    element: int = 0

    def __post_init__(self) -> None:
        if min(self.step, self.parameter, self.element) < 0:
            raise ValueError(f"{self}: expected numbers from 0")
        self.event  # refuses what is no event  # noqa: B018

    @property
    def event(self) -> Event:
        return Event("overflow", self.value, self.axes, self.at)
