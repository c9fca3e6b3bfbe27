"""One step of a GPT over tensor-, pipeline- and data-parallel ranks: the case as data.

Shapes: N replicas (one for each coordinate outside of tp, pp and dp, with data of its own), D data-parallel ranks, B
sequences on each, of S tokens, cut into M micro-batches; V vocabulary, H hidden.

    ids, targets     [N, D, B, S], int64
    a parameter      as `reference.gpt_parameters.shapes` says; its gradient is [N, *shape], summed over the whole batch
    loss             [N, 1], the mean over all valid tokens of the batch, of all D ranks and M micro-batches
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from reference.dtypes import Format, format_of
from reference.ids import Ids
from reference.mesh import Mesh
from reference.recipe import Recipe
from reference.transformer import DROPOUT, Activation, Norm, TransformerCase, TransformerRecipes

Schedule = Literal["gpipe", "1f1b", "interleaved"]
Positions = Literal["none", "learned", "rotary"]
Recompute = Literal["none", "selective", "full", "stage"]
Update = Literal["none", "sharded"]

#: The axes along which ranks work on one model.
MODEL_AXES = ("tp", "pp", "dp")


def _normal() -> Recipe:
    return Recipe("normal")


@dataclass(frozen=True)
class GptRecipes:
    """How the parameters are filled: ``weight`` the matrices and tables, ``vector`` biases and norms."""

    weight: Recipe = field(default_factory=_normal)
    vector: Recipe = field(default_factory=_normal)


@dataclass(frozen=True)
class GptCase:
    """One step of a GPT: forward and backward of the whole batch, and the reduction of the gradients.

    Each layer is one of `reference.transformer`, with its options, cut over tp. Stage s of ``chunks`` * pp lies on the
    rank s % pp, and has ``depths[s]`` layers, read round and round; the first also has the embeddings, the last one the
    final norm, the output and the loss. ``tied``: output and embedding are one weight.

    ``sizes``: the sequences of each micro-batch of a rank. ``counts``: how many tokens of a sequence are valid, the
    first ones, read round and round; the others have no loss. ``recompute``: activations are computed again, of
    attention, of each layer, or of the whole stage. ``dropout``: the probability, of what is embedded, of attention,
    and of what is added to the residual; the masks are the ranks' own. ``update``: none; or ``sharded``: an optimizer
    that is sharded over dp sums the gradients of its ranks, and subtracts them from the parameters, which are then
    compared.
    """

    mesh: Mesh
    vocabulary: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    depths: tuple[int, ...] = (1,)
    sizes: tuple[int, ...] = (1,)
    length: int = 1
    counts: tuple[int, ...] = (1,)
    schedule: Schedule = "gpipe"
    chunks: int = 1
    dtype: str = "fp32"
    tied: bool = False
    positions: Positions = "none"
    norm: Norm = "layer"
    activation: Activation = "gelu"
    qk_norm: bool = False
    bias: bool = False
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    dropout: float = 0.0
    main_grad: bool = False
    update: Update = "none"
    ids: Ids = field(default_factory=Ids)
    recipes: GptRecipes = field(default_factory=GptRecipes)

    def __post_init__(self) -> None:
        format_of(self.dtype)
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected one of {', '.join(get_args(kind))}")
        tp = self.mesh.axis_size("tp")
        if self.vocabulary < tp:
            raise ValueError(f"vocabulary {self.vocabulary} on {tp} ranks: expected at least one token a rank")
        if self.length < 1 or self.chunks < 1:
            raise ValueError(f"length {self.length} and chunks {self.chunks}: expected at least 1")
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"sizes {self.sizes}: expected one or more, each at least 1")
        if not self.depths or min(self.depths) < 0:
            raise ValueError(f"depths {self.depths}: expected one or more, none below 0")
        if not self.counts or min(self.counts) < 0 or max(self.counts) > self.length:
            raise ValueError(f"counts {self.counts}: expected one or more from 0 to the length {self.length}")
        if self.schedule == "1f1b" and self.chunks > 1:
            raise ValueError(f"1f1b has one chunk a rank, not {self.chunks}")
        if self.dropout not in DROPOUT:
            raise ValueError(f"dropout {self.dropout}: expected one of {', '.join(map(str, DROPOUT))}")
        if self.update == "sharded" and self.main_grad:
            raise ValueError("a sharded update reads the gradients of the parameters, and no main_grad")
        self.layer(1)  # refuses sizes that do not fit

    def layer(self, sequences: int) -> TransformerCase:
        """Each layer, on a micro-batch of so many sequences."""
        mesh = self.mesh if "tp" in self.mesh.names else Mesh((*self.mesh.axes, ("tp", 1)))
        return TransformerCase(
            mesh=mesh,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn=self.ffn,
            leading=((self.length, sequences),),
            dtype=self.dtype,
            norm=self.norm,
            activation=self.activation,
            qk_norm=self.qk_norm,
            rotary=self.positions == "rotary",
            bias=self.bias,
            sequence_parallel=self.sequence_parallel,
            main_grad=self.main_grad,
            recipes=TransformerRecipes(weight=self.recipes.weight, vector=self.recipes.vector),
        )

    @property
    def format(self) -> Format:
        return format_of(self.dtype)

    @property
    def loss_format(self) -> Format:
        """Of the loss and all arithmetic in it."""
        return format_of("fp64" if self.dtype == "fp64" else "fp32")

    @property
    def gradient_format(self) -> Format:
        """In which gradients add up."""
        return self.loss_format if self.main_grad else self.format

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes whose ranks train other models, on other data."""
        return tuple(name for name in self.mesh.names if name not in MODEL_AXES)

    @property
    def replicas(self) -> int:
        return self.mesh.axis_size(self.replica_axes)

    @property
    def data_parallel_size(self) -> int:
        return self.mesh.axis_size("dp")

    @property
    def stages(self) -> int:
        return self.chunks * self.mesh.axis_size("pp")

    @property
    def micro_batches(self) -> int:
        return len(self.sizes)

    @property
    def layers(self) -> int:
        """Of the whole model."""
        return sum(self.depth(stage) for stage in range(self.stages))

    def depth(self, stage: int) -> int:
        """The layers of a stage."""
        return self.depths[stage % len(self.depths)]

    def layers_on(self, stage: int) -> range:
        """Their numbers."""
        before = sum(self.depth(s) for s in range(stage))
        return range(before, before + self.depth(stage))

    def stages_on(self, coordinate: int) -> tuple[int, ...]:
        """Those of a rank along pp, by chunk."""
        return tuple(range(coordinate, self.stages, self.mesh.axis_size("pp")))

    @property
    def sequences(self) -> int:
        """Of a data-parallel rank."""
        return sum(self.sizes)

    @property
    def tokens(self) -> int:
        """Of the whole batch of a replica, valid or not."""
        return math.prod((self.data_parallel_size, self.sequences, self.length))


_CHOICES: Mapping[str, object] = {
    "schedule": Schedule,
    "positions": Positions,
    "norm": Norm,
    "activation": Activation,
    "recompute": Recompute,
    "update": Update,
}
