"""Pipeline parallelism: the case as data.

Shapes: R pipelines (one for each coordinate outside the axis, with data of its own), B samples of L tokens of H
features, cut into M micro-batches of S samples each; O features that leave a block and I that enter it.

    input[k], ids[k]    [R, B, L, H], [R, B, L]; k is the step
    weight{j}, bias{j}  [O, I], [O], of block j; their gradients are [R, O, I], [R, O], one for each step
    coefficient         [H]
    loss[step]          [R, 1]

A block is x W^T + b, and its activation. The loss of a token is ``coefficient . x``: without activations all is linear,
so that gradients of whole numbers are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from reference.cases import AlongAxis
from reference.dtypes import Format, format_of
from reference.mesh import Mesh
from reference.recipe import Recipe

Schedule = Literal["gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv"]
Kind = Literal["linear", "tied", "frozen", "plain", "dropout"]
Activation = Literal["none", "relu", "tanh"]
Skip = Literal["none", "every", "last", "never"]
Loss = Literal["sum", "token_mean"]
Update = Literal["none", "sharded"]
Invalid = Literal["no_micro_batches", "small_batch", "chunks", "shape", "dtype", "raises"]
Tensors = dict[str, torch.Tensor]

#: The probability of a dropout block.
DROPOUT = 0.5


@dataclass(frozen=True)
class Block:
    """``linear``: with a weight of its own; ``tied``: with that of the first linear block, where that is as large;
    ``frozen``: without a gradient; ``plain``: no parameters, the activation alone; ``dropout``: likewise, of random
    masks. bias: of those with a weight."""

    kind: Kind = "linear"
    activation: Activation = "none"
    bias: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("kind", Kind), ("activation", Activation)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected one of {', '.join(get_args(kind))}")


@dataclass(frozen=True)
class PipelineRecipes:
    """How each tensor of the case is filled; ``parameter`` weights and biases."""

    input: Recipe = field(default_factory=Recipe)
    parameter: Recipe = field(default_factory=Recipe)
    coefficient: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True)
class PipelineCase(AlongAxis):
    """Steps of a small network whose stages lie on the ranks along ``axis``, ``chunks`` stages on each.

    ``schedule``: the order of forwards and backwards. Stage s lies on rank s % p; in "zbv", with two chunks,
    they go down the ranks and up again. Stage s has ``depths[s]`` blocks, block j is ``blocks[j]``, and the n-th block
    with a weight maps ``widths[n]`` features to ``widths[n + 1]``: all three are read round and round.

    ``sizes``: the samples of each micro-batch. ``counts``: how many tokens of a sample are valid, the first ones, read
    round and round. ``loss``: the sum over valid tokens, or their mean over all micro-batches. ``accumulate``:
    gradients of the steps add up, else they are zeroed between them. ``update``: none; or ``sharded``: an optimizer
    that is sharded over the other axis sums the gradients of the pipelines, and subtracts them from the parameters.

    ``skip``: the first block's result crosses every border beside x, and is added, summed over its features, at the
    start of every stage but the first, of the last one only, or never. ``ids``: whole numbers that cross every border
    and are added there. ``recompute``: activations are computed again in backward. ``invalid``: what must be refused.
    """

    mesh: Mesh
    schedule: Schedule = "gpipe"
    chunks: int = 1
    blocks: tuple[Block, ...] = (Block(),)
    depths: tuple[int, ...] = (1,)
    widths: tuple[int, ...] = (1,)
    sizes: tuple[int, ...] = (1,)
    length: int = 1
    counts: tuple[int, ...] = (1,)
    steps: int = 1
    accumulate: bool = False
    skip: Skip = "none"
    ids: bool = False
    recompute: bool = False
    axis: str = "pp"
    dtype: str = "fp32"
    loss: Loss = "sum"
    update: Update = "none"
    invalid: Invalid | None = None
    recipes: PipelineRecipes = field(default_factory=PipelineRecipes)

    def __post_init__(self) -> None:
        format_of(self.dtype)
        if self.axis not in self.mesh.names:
            raise ValueError(f"the axis {self.axis!r} is not in the mesh {self.mesh}")
        for name, kind in CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected one of {', '.join(get_args(kind))}")
        for name in ("chunks", "steps", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: expected at least 1")
        for name in ("depths", "widths", "sizes"):
            values = getattr(self, name)
            if min(values, default=0) < 1 and (
                name != "sizes" or self.invalid not in ("no_micro_batches", "small_batch")
            ):
                raise ValueError(f"{name} {values}: expected one or more, each at least 1")
        if not self.counts or min(self.counts) < 0 or max(self.counts) > self.length:
            raise ValueError(f"counts {self.counts}: expected one or more from 0 to the length {self.length}")
        if not self.blocks or self.blocks[0].kind != "linear":
            raise ValueError("the first block must be linear: the loss needs a gradient")
        if self.schedule == "1f1b" and self.chunks > 1:
            raise ValueError(f"1f1b has one chunk a rank, not {self.chunks}")
        if self.schedule == "zbv" and self.chunks != 2:
            raise ValueError(f"zbv has two chunks a rank, not {self.chunks}")
        if self.update == "sharded" and (len(self.replica_axes) != 1 or self.drops):
            raise ValueError("a sharded update needs one other axis in the mesh, and no dropout")
        self._require_invalid()

    def _require_invalid(self) -> None:
        if (self.invalid == "no_micro_batches") != (not self.sizes):
            raise ValueError(f"sizes {self.sizes}: expected none where there is no micro-batch, and only there")
        if (self.invalid == "small_batch") != (0 in self.sizes):
            raise ValueError(f"sizes {self.sizes}: expected a 0 where the batch is too small, and only there")
        if self.invalid in ("chunks", "shape", "dtype") and self.parallel_size == 1:
            raise ValueError("one rank has no border to another")

    @property
    def stages(self) -> int:
        return self.chunks * self.parallel_size

    @property
    def micro_batches(self) -> int:
        return len(self.sizes)

    @property
    def drops(self) -> bool:
        """Whether there is dropout, and so no value to expect."""
        kinds = {self.blocks[j % len(self.blocks)].kind for j in range(sum(self.depth(s) for s in range(self.stages)))}
        return "dropout" in kinds

    def depth(self, stage: int) -> int:
        """The blocks of a stage."""
        return self.depths[stage % len(self.depths)]

    @property
    def loss_format(self) -> Format:
        """That of the loss of a token, and of what is made of it."""
        return format_of("fp64" if self.dtype == "fp64" else "fp32")

    def coordinate_of(self, stage: int) -> int:
        """Along the axis, the rank that holds a stage."""
        p = self.parallel_size
        down = stage // p % 2 == 1 and self.schedule == "zbv"
        return p - 1 - stage % p if down else stage % p

    def stages_on(self, coordinate: int) -> tuple[int, ...]:
        """Those of a rank, by chunk."""
        return tuple(s for s in range(self.stages) if self.coordinate_of(s) == coordinate)


CHOICES: Mapping[str, object] = {
    "schedule": Schedule,
    "skip": Skip,
    "loss": Loss,
    "update": Update,
    "invalid": Literal[None, Invalid],
}
