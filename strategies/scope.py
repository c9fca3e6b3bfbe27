"""What may be drawn: the user's limits and what the candidate declares."""

from __future__ import annotations

from dataclasses import dataclass

from reference.dtypes import FORMATS
from reference.layout import Rule
from reference.mesh import AXES


@dataclass(frozen=True)
class Scope:
    """Limits on the cases of one candidate.

    max_world: the largest number of ranks. largest_mesh: likewise where groups are only computed. dtypes: format names.
    axes: mesh axes that may be above 1. parts: the candidate's methods. features: the optional features that it
    supports. uneven: how it cuts what is not divisible. token_dims: how many token dimensions a layer's input may have.
    checks_initialization: whether it declares one.
    """

    max_world: int = 4
    largest_mesh: int = 10**6
    dtypes: tuple[str, ...] = tuple(FORMATS)
    axes: tuple[str, ...] = AXES
    parts: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    uneven: Rule = "balanced"
    token_dims: tuple[int, ...] = (1, 2, 3)
    checks_initialization: bool = False

    def usual(self, axis: str) -> str:
        """The axis along which cases lie where a candidate takes only one: this one where it has it, else its first."""
        return axis if axis in self.axes else self.axes[0]

    def has(self, feature: str) -> bool:
        return feature in self.features
