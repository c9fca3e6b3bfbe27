"""What the cases of layers that are cut along one axis have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from reference.dtypes import FORMATS, Format, format_of
from reference.mesh import Mesh
from reference.recipe import EXACT_KINDS


class AlongAxis:
    """A case with a mesh, an axis of it, and a dtype.

    The ranks along the axis work together; those that differ in other coordinates are replicas with data of their own.
    """

    if TYPE_CHECKING:

        @property
        def mesh(self) -> Mesh: ...
        @property
        def axis(self) -> str: ...
        @property
        def dtype(self) -> str: ...

    @property
    def format(self) -> Format:
        return format_of(self.dtype)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes whose ranks do the same on other data."""
        return tuple(name for name in self.mesh.names if name != self.axis)

    @property
    def replicas(self) -> int:
        return self.mesh.size // self.parallel_size

    @property
    def parallel_size(self) -> int:
        """The number of ranks that work together."""
        return self.mesh.axis_size(self.axis)


def exponent(fmt: Format, main_grad: bool, m: int) -> int:
    """The power of two by which the output gradient of micro-batch ``m`` is scaled.

    With ``main_grad`` in low precision every second one is so much smaller that the total over micro-batches is exact
    in fp32 and hardly ever in the dtype: then a total that is kept in the dtype shows.
    """
    p = fmt.precision
    return -p if main_grad and 2 * p < FORMATS["fp32"].precision and m % 2 else 0


def totals(fmt: Format, main_grad: bool, counts: Sequence[int]) -> tuple[int, int]:
    """For the lattice bound: the terms of a sum over micro-batches, of so many each, in units of the smallest; and the
    precision in which it is exact."""
    steps = [2 ** -exponent(fmt, main_grad, m) for m in range(len(counts))]
    total = sum(count * max(steps) // step for count, step in zip(counts, steps, strict=True))
    return total, FORMATS["fp32"].precision if max(steps) > 1 else fmt.precision


def all_exact(recipes: Any) -> bool:
    """Whether every tensor's data is such that no sum rounds, so that results must equal one process bit by bit."""
    return all(getattr(recipes, f.name).kind in EXACT_KINDS for f in fields(recipes))
