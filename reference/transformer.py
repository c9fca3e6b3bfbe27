"""A transformer layer: the case as data, and what one process computes.

Shapes: R replicas (one for each coordinate outside the layer's axis, with data of its own), S tokens of each of B
sequences in a micro-batch, H hidden, A heads and G key/value heads of D = H / A features, F ffn.

    input[m], output[m]     [R, S, B, H]
    a parameter             as `shapes` says; its gradient is [R, *shape], summed over micro-batches
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from reference.attention import Mask
from reference.cases import AlongAxis
from reference.dtypes import format_of
from reference.linear import Backward
from reference.mesh import Mesh
from reference.precision import computed_in
from reference.recipe import Recipe, fill
from reference.transformer_dropout import dropping, mask_names
from reference.transformer_layer import attend, feed

Norm = Literal["layer", "rms"]
Activation = Literal["gelu", "swiglu"]
Recompute = Literal["none", "selective", "full"]
Tensors = dict[str, torch.Tensor]

#: The probabilities of dropout that a case may have.
DROPOUT = (0.0, 0.1, 0.5)


def _normal() -> Recipe:
    return Recipe("normal")


@dataclass(frozen=True)
class TransformerRecipes:
    """How the tensors of the case are filled: ``weight`` the matrices, ``vector`` biases and norms."""

    input: Recipe = field(default_factory=_normal)
    weight: Recipe = field(default_factory=_normal)
    vector: Recipe = field(default_factory=_normal)
    output_grad: Recipe = field(default_factory=_normal)


@dataclass(frozen=True)
class TransformerCase(AlongAxis):
    """One pre-norm layer whose heads and ffn are cut over the ranks along ``axis``, run forward and backward on each
    micro-batch, of which ``leading`` lists (tokens, sequences).

    ``qk_norm`` norms each head's queries and keys, ``rotary`` then turns them by their position. ``kv_heads`` below
    the number of ranks are held by several of them. ``bias`` is that of all linear layers; layer norms always have one.
    ``sequence_parallel`` cuts the tokens over the ranks outside attention and mlp. ``recompute`` says what backward
    computes again: nothing, attention, or the layer. ``dropout`` is the probability for attention and for what is
    added to the residual; what is then expected depends on the masks. ``seed`` decides them, and initial values. The
    rest as in `reference.linear.LinearCase`.
    """

    mesh: Mesh
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    leading: tuple[tuple[int, int], ...] = ((1, 1),)
    axis: str = "tp"
    dtype: str = "fp32"
    norm: Norm = "layer"
    activation: Activation = "gelu"
    qk_norm: bool = False
    rotary: bool = False
    mask: Mask = "causal"
    bias: bool = False
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    dropout: float = 0.0
    seed: int = 0
    explicit_group: bool = False
    main_grad: bool = False
    input_requires_grad: bool = True
    transposed: bool = False
    backward: Backward = "immediate"
    init: bool = False
    recipes: TransformerRecipes = field(default_factory=TransformerRecipes)

    def __post_init__(self) -> None:
        format_of(self.dtype)
        if self.axis not in self.mesh.names:
            raise ValueError(f"the layer's axis {self.axis!r} is not in the mesh {self.mesh}")
        if min(self.hidden, self.heads, self.kv_heads, self.ffn) < 1 or self.seed < 0:
            sizes = f"hidden {self.hidden}, heads {self.heads}, kv_heads {self.kv_heads}, ffn {self.ffn}"
            raise ValueError(f"{sizes} must be at least 1, and seed {self.seed} at least 0")
        if not self.leading or any(len(dims) != 2 or min(dims) < 1 for dims in self.leading):
            raise ValueError(f"leading {self.leading}: expected (tokens, sequences) of each micro-batch, at least 1")
        n = self.parallel_size
        for what, length, divisor in (
            ("hidden", self.hidden, ("heads", self.heads)),
            ("heads", self.heads, ("ranks", n)),
            ("ffn", self.ffn, ("ranks", n)),
            ("heads", self.heads, ("kv_heads", self.kv_heads)),
            *((("tokens", tokens, ("ranks", n)) for tokens, _ in self.leading) if self.sequence_parallel else ()),
        ):
            if length % divisor[1]:
                raise ValueError(f"{what} {length} is not a multiple of {divisor[0]} {divisor[1]}")
        if self.kv_heads % n and n % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} on {n} ranks: one must be a multiple of the other")
        if self.rotary and self.head_size % 2:
            raise ValueError(f"rotary turns pairs of features: a head has {self.head_size}, expected an even number")
        if self.dropout not in DROPOUT:
            raise ValueError(f"dropout {self.dropout}: expected one of {', '.join(map(str, DROPOUT))}")
        if self.init and self.dropout:
            raise ValueError(f"init and dropout {self.dropout}: a case compares initial values or masks, not both")
        if self.axis != "tp" and not self.explicit_group:
            raise ValueError(f"axis {self.axis!r} is not the default group: the layer must be given an explicit group")
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                expected = ", ".join(map(repr, get_args(kind)))
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected one of {expected}")

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_copies(self) -> int:
        """How many neighbouring ranks hold the same key/value heads."""
        return max(1, self.parallel_size // self.kv_heads)

    @property
    def trains(self) -> bool:
        return self.backward != "never"


_CHOICES = {"norm": Norm, "activation": Activation, "mask": Mask, "recompute": Recompute, "backward": Backward}


def shapes(case: TransformerCase) -> dict[str, tuple[int, ...]]:
    """The global shape of every parameter, in the order in which backward reaches them."""
    H, F, queries, keys = case.hidden, case.ffn, case.hidden, case.kv_heads * case.head_size
    matrices = {"down": (H, F), "up": (F, H)}
    if case.activation == "swiglu":
        matrices["gate"] = (F, H)
    attention = {"o": (H, queries), "q": (queries, H), "k": (keys, H), "v": (keys, H)}
    found: dict[str, tuple[int, ...]] = {}

    def add(name: str, shape: tuple[int, ...], bias: bool) -> None:
        found[f"{name}_weight"] = shape
        if bias:
            found[f"{name}_bias"] = shape[:1]

    for name, shape in matrices.items():
        add(name, shape, case.bias)
    add("norm2", (H,), case.norm == "layer")
    add("o", attention.pop("o"), case.bias)
    if case.qk_norm:
        found |= {"q_norm_weight": (case.head_size,), "k_norm_weight": (case.head_size,)}
    for name, shape in attention.items():
        add(name, shape, case.bias)
    add("norm1", (H,), case.norm == "layer")
    return found


def tensors(case: TransformerCase) -> Tensors:
    """Every global tensor of the case, float64, filled by its recipe and rounded to the case's dtype.

    Weights are divided by the root of their fan-in, so that activations stay of the order of the input.
    """

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return values.to(case.format.torch_dtype).to(torch.float64)

    made: Tensors = {}
    for name, shape in shapes(case).items():
        if len(shape) == 2:
            made[name] = rounded(fill(case.recipes.weight, name, shape, case.format) / math.sqrt(shape[1]))
            continue
        values = fill(case.recipes.vector, name, shape, case.format)
        made[name] = rounded(1 + values / 4 if "norm" in name and name.endswith("weight") else values / 2)
    for m, dims in enumerate(case.leading):
        shape = (case.replicas, *dims, case.hidden)
        made[f"input[{m}]"] = fill(case.recipes.input, f"input[{m}]", shape, case.format)
        made[f"output[{m}].grad"] = fill(case.recipes.output_grad, f"output[{m}].grad", shape, case.format)
    return made


def expected(case: TransformerCase, given: Tensors) -> dict[str, torch.Tensor | None]:
    """Outputs and gradients of one process, float64; None where there must be no gradient.

    The forward is written out, its gradients are autograd's. With dropout, ``given`` has the masks too: what is kept,
    see `reference.transformer_dropout`. Raises ValueError where they are missing.
    """
    missing = [name for name in mask_names(case) if name not in given]
    if missing:
        raise ValueError(f"dropout {case.dropout} without {', '.join(missing)}: expected what each mask keeps")
    leaves = leaves_of(case, given)
    out: dict[str, torch.Tensor | None] = {}
    totals: dict[str, list[torch.Tensor]] = {name: [] for name in leaves}
    inputs: dict[str, torch.Tensor | None] = {}
    for m in range(len(case.leading)):
        x = given[f"input[{m}]"].clone().requires_grad_(case.trains and case.input_requires_grad)
        drop = dropping(case, given, m)
        z = feed(case, leaves, attend(case, leaves, x, m, drop), drop)
        out[f"output[{m}]"] = z.detach()
        inputs[f"input[{m}].grad"] = None
        if case.trains:
            wanted = [*leaves.values(), *([x] if x.requires_grad else [])]
            found = torch.autograd.grad(z, wanted, given[f"output[{m}].grad"])
            for name, gradient in zip(totals, found, strict=False):
                totals[name].append(gradient)
            if x.requires_grad:
                inputs[f"input[{m}].grad"] = found[-1]
    for name, shape in shapes(case).items():
        out[f"{name}.grad"] = _total(case, totals[name], shape) if case.trains else None
    return out | inputs


def leaves_of(case: TransformerCase, given: Tensors) -> Tensors:
    """The parameters, one for each replica, as `reference.transformer_layer` wants them; each gets its gradient."""
    leaves = {}
    for name, shape in shapes(case).items():
        dims = shape if len(shape) == 2 else (1,) * (3 if name in ("q_norm_weight", "k_norm_weight") else 2) + shape
        value = given[name].view(dims).expand(case.replicas, *dims).clone()
        leaves[name] = value.requires_grad_(case.trains)
    return leaves


def _total(case: TransformerCase, micro_batches: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """The sum over micro-batches, in fp32 at least where there is a main gradient."""
    with computed_in("fp32" if case.main_grad and case.dtype != "fp64" else case.dtype):
        # As one sum: micro-batches may come in any order, and what overflows in one may not in another.
        return torch.stack(micro_batches).sum(0).view(case.replicas, *shape)
