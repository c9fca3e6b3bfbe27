"""What a built module is put through on one rank, as data: the same for every candidate and subject."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from harness.local import WrongAdapter, permuted
from reference.layout import Layout, Window, layout_text, partial_axes, window, with_each
from reference.mesh import Mesh

Outputs: TypeAlias = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Given:
    """A global tensor that goes in, float64 or whole numbers, and its layout. dtype: where not that of the exercise."""

    values: torch.Tensor
    layout: Layout
    requires_grad: bool = False
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Result:
    """A tensor that must come out: its global shape and layout. dtype: where not that of the exercise."""

    shape: tuple[int, ...]
    layout: Layout
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward: the inputs in the order of the call, the outputs in the order of return, and the
    gradient of what the consumer makes of them; and the dropout masks of forward, by their place."""

    inputs: Mapping[str, Given]
    outputs: Mapping[str, Result]
    output_grad: Given
    masks: Mapping[str, Result] = field(default_factory=dict)


@dataclass(frozen=True)
class Names:
    """What a subject calls its tensors: those of a case are some of them."""

    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Exercise:
    """All that one module is put through.

    parameters: global values and whether they train. replica_axes: the axes along which ranks have data of their own.
    consume: what the caller does with the outputs before the loss. backward: when backward runs, see
    `reference.linear.Backward`. transposed: hand over non-contiguous inputs and gradients. main_grad: read gradients
    from ``main_grad``. only_initial: build, and read the initial parameters.
    """

    mesh: Mesh
    rank: int
    dtype: torch.dtype
    names: Names
    parameters: Mapping[str, Given]
    micro_batches: Sequence[MicroBatch]
    replica_axes: tuple[str, ...] = ()
    consume: Callable[[Outputs], torch.Tensor] = lambda outputs: outputs[0]
    backward: Literal["immediate", "delayed", "reversed", "never"] = "immediate"
    transposed: bool = False
    main_grad: bool = False
    only_initial: bool = False

    @property
    def trains(self) -> bool:
        """Whether there is anything to run backward for."""
        inputs = [given for micro_batch in self.micro_batches for given in micro_batch.inputs.values()]
        return self.backward != "never" and any(given.requires_grad for given in (*self.parameters.values(), *inputs))

    def said(self, layouts: Mapping[str, Layout], name: str) -> Layout | None:
        """The layout that a candidate gives a tensor other than a parameter, or None. It names the layout of
        ``input`` once for every ``input[m]``, and need not say that replicas have tensors of their own."""
        layout = layouts.get(name.partition("[")[0])
        if layout is None:
            return None
        try:
            return with_each(layout, self.replica_axes)
        except ValueError as error:
            raise WrongAdapter(_misfit(name, layout, error)) from None

    def local(self, name: str, given: Given, layout: Layout | None = None) -> torch.Tensor:
        """This rank's part of a tensor that goes in, in its dtype, as a tensor of its own.

        Of a partial tensor every element is on one of the ranks, and zero on the others.
        """
        layout = layout or given.layout
        part = self.window(name, tuple(given.values.shape), layout).take(given.values)
        part = part.to(given.dtype or self.dtype) if part.is_floating_point() else part
        axes = partial_axes(layout)
        if axes:
            elements = torch.arange(part.numel()).view(part.shape)
            mine = elements % self.mesh.axis_size(axes) == self.mesh.coordinate(self.rank, axes)
            part = torch.where(mine, part, 0)
        return permuted(part) if self.transposed else part.clone(memory_format=torch.contiguous_format)

    def window(self, name: str, shape: tuple[int, ...], layout: Layout) -> Window:
        """This rank's window. Raises WrongAdapter where a layout, which can only be the candidate's, does not fit."""
        try:
            return window(shape, layout, self.mesh, self.rank)
        except ValueError as error:
            raise WrongAdapter(_misfit(name, layout, error)) from None


def _misfit(name: str, layout: Layout, error: ValueError) -> str:
    return f"the layout {layout_text(layout)} of {name} does not fit, correct it in Sharded(...): {error}"
