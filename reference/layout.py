"""How a global tensor is cut over a mesh.

A layout is one placement or a tuple of them; mesh axes that no placement names hold the same values (replicas).
``Split`` cuts a dimension, ``Partial`` says that the ranks' values still have to be summed, ``Each`` says that the
global tensor's first dimension lists one tensor for each coordinate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np

from reference.mesh import Mesh

if TYPE_CHECKING:
    import torch

Axes: TypeAlias = str | tuple[str, ...]
Rule = Literal["balanced", "chunk"]
Array = TypeVar("Array", "np.ndarray", "torch.Tensor")


@dataclass(frozen=True)
class Whole:
    """Every rank holds the whole tensor."""


@dataclass(frozen=True)
class Split:
    """Dimension ``dim`` is cut over the ranks along ``axis``, in the order of their coordinates.

    ``sizes`` gives an uneven cut explicitly, one length for each piece. Without it an even cut is used, and
    where the length is not divisible ``rule`` decides: ``balanced`` makes the first ranks one longer
    (numpy.array_split), ``chunk`` makes all but the last ones ceil(length / n) long (torch.chunk, DTensor).
    ``copies`` neighbouring ranks hold the same piece, as ranks do that share a key/value head: there are n / copies
    pieces, and as many ``sizes``.
    """

    dim: int
    axis: Axes
    sizes: tuple[int, ...] | None = None
    rule: Rule = "balanced"
    copies: int = 1

    def __post_init__(self) -> None:
        if self.copies < 1:
            raise ValueError(f"copies={self.copies} of a split: expected at least 1, the ranks that share a piece")

    def __repr__(self) -> str:
        sizes = "" if self.sizes is None else f", sizes={self.sizes}"
        rule = "" if self.rule == "balanced" else f", rule={self.rule!r}"
        copies = "" if self.copies == 1 else f", copies={self.copies}"
        return f"Split({self.dim}, {self.axis!r}{sizes}{rule}{copies})"


@dataclass(frozen=True)
class Partial:
    """The global value is the sum of the local values over the ranks along ``axis``."""

    axis: Axes

    def __repr__(self) -> str:
        return f"Partial({self.axis!r})"


@dataclass(frozen=True)
class Each:
    """The global tensor's first dimension holds one tensor for each coordinate along ``axis``."""

    axis: Axes

    def __repr__(self) -> str:
        return f"Each({self.axis!r})"


Placement: TypeAlias = Whole | Split | Partial | Each
Layout: TypeAlias = Placement | tuple[Placement, ...]


def placements(layout: Layout) -> tuple[Placement, ...]:
    """The layout as a tuple, ``Each`` first, without ``Whole``.

    Raises TypeError for anything else, and ValueError where two placements name an axis: its ranks would not hold
    every part of the tensor.
    """
    parts = layout if isinstance(layout, tuple) else (layout,)
    for part in parts:
        if not isinstance(part, Whole | Split | Partial | Each):
            raise TypeError(f"{part!r} is not a layout: use Split(dim, axis), Whole(), Partial(axis) or Each(axis)")
    cuts = tuple(p for p in parts if isinstance(p, Split | Partial))
    found = tuple(p for p in parts if isinstance(p, Each)) + cuts
    named = [axis for p in found for axis in _axes(p)]
    repeated = [axis for axis in named if named.count(axis) > 1]
    if repeated:
        raise ValueError(f"axis {repeated[0]!r} is used twice in {' and '.join(map(str, found))}: use each axis once")
    return found


def with_each(layout: Layout, axes: tuple[str, ...]) -> Layout:
    """The layout of a tensor of which every coordinate along ``axes`` has one of its own, unless it says so already.

    Raises TypeError and ValueError as `placements` does.
    """
    parts = placements(layout)
    return parts if any(isinstance(part, Each) for part in parts) else placements((Each(axes), *parts))


def of_gradient(layout: Layout) -> Layout:
    """The layout of a tensor's gradient: of a sum, every summand has all of it."""
    return tuple(part for part in placements(layout) if not isinstance(part, Partial))


def layout_text(layout: Layout) -> str:
    """The layout as a user writes it."""
    return " and ".join(str(part) for part in placements(layout) if part != Each(())) or "Whole()"


def layout_in_words(layout: Layout) -> str:
    """`layout_text`, but what lies on the ranks of one coordinate whole, as a parameter on its stage, is said so."""
    said = []
    for part in placements(layout):
        there = [at for at, size in enumerate(part.sizes or ()) if size] if isinstance(part, Split) else []
        if isinstance(part, Split) and part.copies == 1 and isinstance(part.axis, str) and len(there) == 1:
            said += [f"all on {part.axis}={there[0]}"] if len(part.sizes or ()) > 1 else []
        else:
            said.append(layout_text(part))
    return " and ".join(one for one in said if one != layout_text(())) or layout_text(())


def cut(length: int, parts: int, rule: Rule = "balanced") -> tuple[int, ...]:
    """The lengths of ``parts`` pieces of a dimension; pieces may be empty."""
    if rule == "chunk":
        chunk = -(-length // parts) if length else 0
        return tuple(max(0, min(chunk, length - i * chunk)) for i in range(parts))
    return tuple(length // parts + (i < length % parts) for i in range(parts))


@dataclass(frozen=True)
class Window:
    """The part of a global tensor that one rank holds: ``lead`` indexes the first dimensions away, and ``ranges``
    gives (start, length) of the others."""

    lead: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(length for _, length in self.ranges)

    def take(self, tensor: Array) -> Array:
        """This window of the global tensor, a view."""
        # The ellipsis keeps a numpy array an array where every dimension is indexed away.
        index: tuple[Any, ...] = (*self.lead, *(slice(start, start + length) for start, length in self.ranges), ...)
        part: Array = tensor[index]
        return part

    def global_index(self, local: Sequence[int]) -> tuple[int, ...]:
        """Where a local element lies in the global tensor."""
        return (*self.lead, *(start + i for (start, _), i in zip(self.ranges, local, strict=True)))


def window(shape: Sequence[int], layout: Layout, mesh: Mesh, rank: int) -> Window:
    """The part of a global tensor of ``shape`` that ``rank`` holds.

    Raises ValueError where the layout does not fit the shape or the mesh.
    """
    lead: list[int] = []
    ranges = [(0, length) for length in shape]
    for placement in placements(layout):
        if isinstance(placement, Each):
            n = mesh.axis_size(placement.axis)
            if not ranges or ranges[0][1] != n:
                raise ValueError(f"{placement} needs a first dimension of {n}, but the shape is {tuple(shape)}")
            ranges.pop(0)
            lead.append(mesh.coordinate(rank, placement.axis))
        elif isinstance(placement, Split):
            start, length = _piece(placement, tuple(n for _, n in ranges), mesh, rank)
            dim = placement.dim % len(ranges)
            ranges[dim] = (ranges[dim][0] + start, length)
    return Window(tuple(lead), tuple(ranges))


def partial_axes(layout: Layout) -> tuple[str, ...]:
    """The axes over which the local values still have to be summed."""
    axes: list[str] = []
    for placement in placements(layout):
        if isinstance(placement, Partial):
            axes += _axes(placement)
    return tuple(axes)


def _axes(placement: Split | Partial | Each) -> tuple[str, ...]:
    return (placement.axis,) if isinstance(placement.axis, str) else placement.axis


def _piece(split: Split, shape: tuple[int, ...], mesh: Mesh, rank: int) -> tuple[int, int]:
    if not -len(shape) <= split.dim < len(shape):
        raise ValueError(f"{split} cuts dimension {split.dim} of a tensor of shape {shape}")
    length, ranks = shape[split.dim], mesh.axis_size(split.axis)
    if ranks % split.copies:
        raise ValueError(f"{split}: the number of ranks, {ranks}, must be a multiple of copies")
    n, at = ranks // split.copies, mesh.coordinate(rank, split.axis) // split.copies
    sizes = cut(length, n, split.rule) if split.sizes is None else split.sizes
    if len(sizes) != n or sum(sizes) != length or min(sizes) < 0:
        raise ValueError(f"{split}: the sizes must be {n} lengths that add up to {length}")
    return sum(sizes[:at]), sizes[at]
