"""What the known mistakes of a linear layer are made of: the case's tensors, and each rank's piece of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from reference.layout import Rule, cut
from reference.linear import LinearCase

Values: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Layer:
    """The case with what the mistakes are made of; every array is [R, ...] and a rank's replica counts."""

    case: LinearCase
    given: dict[str, Values]
    uneven: Rule

    @property
    def n(self) -> int:
        return self.case.parallel_size

    @property
    def axis(self) -> str:
        return self.case.axis

    @property
    def column(self) -> bool:
        return self.case.kind == "column"

    @property
    def micro_batches(self) -> range:
        return range(len(self.case.leading))

    @cached_property
    def pieces(self) -> list[slice]:
        """Of the features that are cut, each coordinate's."""
        return self._slices(self.case.out_features if self.column else self.case.in_features)

    def tokens(self, m: int) -> list[slice]:
        """Of the first token dimension of a micro-batch, each coordinate's under sequence parallelism."""
        return self._slices(self.case.leading[m][0])

    def _slices(self, length: int) -> list[slice]:
        ends = np.cumsum([0, *cut(length, self.n, self.uneven)])
        return [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]

    def x(self, m: int) -> Values:
        return self.given[f"input[{m}]"]

    def g(self, m: int) -> Values:
        return self.given[f"output[{m}].grad"]

    def per_rank(self, value: Callable[[int], Values]) -> tuple[Values, ...]:
        """``value`` of each rank's coordinate along the layer's axis."""
        made = [value(c) for c in range(self.n)]
        return tuple(made[self.case.mesh.coordinate(rank, self.axis)] for rank in range(self.case.mesh.size))

    def summed_elsewhere(self, part: Callable[[int], Values]) -> Iterator[tuple[str, tuple[Values, ...]]]:
        """The sums of the ranks' own parts [R, ...] over other groups than the layer's, by what the group is called."""
        mesh, parts = self.case.mesh, [part(c) for c in range(self.n)]
        own = [
            parts[mesh.coordinate(rank, self.axis)][mesh.coordinate(rank, self.case.replica_axes)]
            for rank in range(mesh.size)
        ]
        axes: list[tuple[str, str | tuple[str, ...]]] = [(a, a) for a in mesh.names if a != self.axis]
        several = sum(size > 1 for _, size in mesh.axes) > 1
        for label, over in [*axes, *([("all ranks", mesh.names)] if several else [])]:
            if mesh.axis_size(over) > 1:
                sums = (sum((own[q] for q in mesh.group_of(r, over)), np.zeros(())) for r in range(mesh.size))
                yield label, tuple(np.broadcast_to(s, (self.case.replicas, *s.shape)) for s in sums)

    @property
    def or_dropped(self) -> str:
        """What else a missing sum may be where the data is not contiguous, or where the default group has one rank."""
        more = ", or reduces a contiguous copy and returns the original" if self.case.transposed else ""
        if self.axis != "tp" and self.case.mesh.axis_size("tp") == 1:
            more += f", or is done over tp, a group of one rank, instead of {self.axis}"
        return more
