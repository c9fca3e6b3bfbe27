"""What a diagnosis looks at: one tensor of a case, what it should be, and what the ranks hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from harness.oracle.compare import different
from reference.layout import Layout, Window, window
from reference.mesh import Mesh

Values = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: An explanation is sure when the errors carry this many bits more than it took to choose it: a chance of 1 in 32.
MARGIN = 5.0


@dataclass(frozen=True, eq=False)
class Suspect:
    """What the tensor would be with one known fault.

    cause: the rest of a sentence that starts with the tensor's name, as in "equals the rank's own part before the sum
    over tp: an all-reduce is missing in backward". values: float64, one array for all ranks or one a rank; each either
    of the global shape, of which the rank's window counts, or of the rank's local shape.
    """

    cause: str
    values: Values | tuple[Values, ...]


@dataclass(frozen=True, eq=False)
class Evidence:
    """One tensor that is not what one process computes. All arrays are float64.

    name: of the tensor. want: the global values. layout, mesh: how the ranks hold it. got: the local values of each
    rank, summed over the axes that the layout declares partial. tolerance: how far off an element may be, of the global
    shape, or None where it must be exact; infinite where any value is right. dtype: torch's name of the dtype that the
    ranks hold. others: global values of other tensors of the case, by name; parameters come before what is made of
    them. micro_batches: their number. counts: other numbers of the case by which a factor may come about, by name, for
    example ``query heads that share a key-value head``. suspects: makes the subject's own explanations, called when
    they are needed. margin: of bits, for an explanation to be said.

    Raises ValueError where the shapes do not fit each other.
    """

    name: str
    want: Values
    layout: Layout
    mesh: Mesh
    got: tuple[Values, ...]
    tolerance: Values | None = None
    dtype: str = "float64"
    others: Mapping[str, Values] = field(default_factory=dict)
    micro_batches: int = 1
    counts: Mapping[str, int] = field(default_factory=dict)
    suspects: Callable[[], Sequence[Suspect]] = tuple
    margin: float = MARGIN

    def __post_init__(self) -> None:
        if len(self.got) != self.mesh.size:
            raise ValueError(f"{self.name}: values of {len(self.got)} ranks on a mesh of {self.mesh.size}")
        for rank, (got, part) in enumerate(zip(self.got, self.windows, strict=True)):
            if got.shape != part.shape:
                raise ValueError(f"{self.name}: rank {rank} holds shape {got.shape}; expected {part.shape}")
        if self.tolerance is not None and self.tolerance.shape != self.want.shape:
            raise ValueError(f"{self.name}: tolerance of shape {self.tolerance.shape}; expected {self.want.shape}")

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """The part of the global tensor that each rank holds."""
        return tuple(window(self.want.shape, self.layout, self.mesh, rank) for rank in range(self.mesh.size))

    @cached_property
    def wants(self) -> tuple[Values, ...]:
        """What each rank should hold."""
        return self.local(self.want)

    @cached_property
    def limits(self) -> tuple[Values, ...] | None:
        """How far off each rank's elements may be, or None where they must be exact."""
        if self.tolerance is None:
            return None
        return self.local(np.nan_to_num(self.tolerance, nan=0.0, posinf=np.inf))

    @cached_property
    def wrong(self) -> tuple[Mask, ...]:
        """Where each rank's elements are wrong."""
        masks = []
        for rank, (got, want) in enumerate(zip(self.got, self.wants, strict=True)):
            mask = different(got, want)
            if self.limits is not None:
                with np.errstate(invalid="ignore"):
                    near = np.abs(got - want) <= self.limits[rank]
                mask &= ~(near | np.isposinf(self.limits[rank]))
            masks.append(mask)
        return tuple(masks)

    @cached_property
    def wrong_ranks(self) -> tuple[int, ...]:
        """The ranks that hold a wrong element."""
        return tuple(rank for rank, mask in enumerate(self.wrong) if mask.any())

    @cached_property
    def known_suspects(self) -> tuple[Suspect, ...]:
        """The suspects, made once."""
        return tuple(self.suspects())

    @cached_property
    def group_sizes(self) -> Mapping[str, int]:
        """The sizes above 1 of single and combined axes, by name, the plainest first."""
        axes = [(name, size) for name, size in self.mesh.axes if size > 1]
        return {
            " x ".join(name for name, _ in some): math.prod(size for _, size in some)
            for count in range(1, len(axes) + 1)
            for some in itertools.combinations(axes, count)
        }

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Those, the number of ``micro-batches`` and the other counts: what a wrong factor may come from."""
        more = {"micro-batches": self.micro_batches, **self.counts}
        return {**self.group_sizes, **{name: count for name, count in more.items() if count > 1}}

    def local(self, values: Values) -> tuple[Values, ...]:
        """Each rank's window of an array of the global shape."""
        return tuple(part.take(values) for part in self.windows)

    def of_suspect(self, suspect: Suspect) -> tuple[Values, ...] | None:
        """What each rank would hold; None where the suspect's shapes do not fit."""
        values = suspect.values
        arrays = values if isinstance(values, tuple) else (values,) * self.mesh.size
        if len(arrays) != self.mesh.size:
            return None
        found = []
        for array, part in zip(arrays, self.windows, strict=True):
            if array.shape == self.want.shape:
                found.append(part.take(array))
            elif array.shape == part.shape:
                found.append(array)
            else:
                return None
        return tuple(found)
