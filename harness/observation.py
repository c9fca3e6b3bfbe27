"""What one rank saw: plain data that travels back to the parent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.world.traffic import Collective
from reference.layout import Layout
from reference.traffic import Phase, Transfer

#: The fact of an observation, where a candidate should refuse something: the exception as text, or None without one.
REFUSED = "refused"
#: And the names of what a load that was refused has changed.
CHANGED = "changed"


@dataclass(frozen=True)
class LocalTensor:
    """One rank's tensor. ``values`` is float64, which holds every format under test exactly; ``problem`` says why
    there are no values, where what came back was no tensor."""

    values: NDArray[np.float64] | None
    dtype: str
    device: str = "cpu"
    problem: str | None = None


@dataclass(frozen=True)
class Sent:
    """A collective that this rank took part in, in a phase of a micro-batch (0 for ``finish``)."""

    phase: Phase
    micro_batch: int
    collective: Collective


@dataclass(frozen=True)
class Observation:
    """What one rank saw of a case.

    tensors: outputs and gradients by name, None where there is none.
    layouts: how the rank's candidate says that each is cut, where it departs from the subject's own.
    side_effects: what the candidate changed that it must not, one sentence each.
    sent: the collectives, in their order; None where they were not recorded.
    due: those that the candidate says it does, where not what the subject needs.
    departs: whether the candidate holds inputs or outputs otherwise than the subject does, so that others may be due.
    facts: anything else a subject looks at, plain data.
    """

    tensors: Mapping[str, LocalTensor | None] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    side_effects: tuple[str, ...] = ()
    sent: tuple[Sent, ...] | None = None
    due: tuple[Transfer, ...] | None = None
    departs: bool = False
    facts: Mapping[Any, Any] = field(default_factory=dict)
