"""Data parallelism: the case as data, and what one process computes on the whole batch.

Shapes: R replica groups (one for each coordinate outside the axis, with data of its own), n ranks along the axis, M
micro-batches, S samples of L tokens of H features; O features of a layer.

    input[k]            [R, n, S, L, H]; k = step * M + m
    weight{i}, bias{i}  [O, H], [O], alike on all ranks; their gradients are [R, O, H], [R, O], one for each step
    coefficient{i}      [O]
    loss[step]          [R]

The loss of a token x is the sum, over the layers that its rank uses, of ``coefficient . (weight x + bias)``: linear, so
that gradients of whole numbers are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

import torch

from reference.cases import AlongAxis
from reference.data_parallel_tokens import divisors, valid_tokens
from reference.dtypes import Format, format_of
from reference.lattice import LARGEST_USEFUL, Sum, Term, lattice_limits
from reference.mesh import Mesh
from reference.recipe import EXACT_KINDS, Recipe, fill

Kind = Literal["own", "tied", "frozen", "unused"]
Loss = Literal["token_mean", "sample_mean", "sum"]
Sync = Literal["last", "every"]
Reduction = Literal["average", "sum"]
ReduceDtype = Literal["same", "fp32", "bf16"]
Invalid = Literal["number", "shape", "dtype", "order"]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """A linear layer of ``out`` features. ``tied``: its weight is that of the first layer, as large; ``frozen``: used,
    and without a gradient; ``unused``: by no rank."""

    out: int = 1
    kind: Kind = "own"
    bias: bool = True

    def __post_init__(self) -> None:
        if self.out < 1:
            raise ValueError(f"a layer of {self.out} features: expected at least 1")
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind is {self.kind!r}: expected one of {', '.join(get_args(Kind))}")


@dataclass(frozen=True)
class DataParallelRecipes:
    """How each tensor of the case is filled; ``parameter`` weights and biases."""

    input: Recipe = field(default_factory=Recipe)
    parameter: Recipe = field(default_factory=Recipe)
    coefficient: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True)
class DataParallelCase(AlongAxis):
    """Training steps of a small network on the ranks along ``axis``, each with data of its own.

    ``features`` enter each of ``layers``. A step has ``micro_batches`` of ``samples`` of ``length`` tokens. How many of
    a sample's tokens are valid, the first ones, ``counts`` says, read round and round; ranks whose coordinate is in
    ``empty`` have none. ``skipped`` lists (layer, coordinate, k) where a layer is not used, k = step * M + m;
    coordinate -1 is all ranks, and numbers too large for the case start again from 0, so that it may shrink.
    ``rotated``: ranks use the layers in different orders.

    ``loss``: the mean over all valid tokens; the mean over all samples that have any, of each one's mean; or the sum.
    ``sync``: gradients are reduced once a step, or after every micro-batch. ``reduction``: what the wrapper does with
    the ranks' gradients; the gradient of ``loss`` is due either way. ``reduce_dtype``: in which format. ``bucket``:
    the largest number of elements that are reduced together, but for a parameter that is larger. ``views``: gradients
    are views of buckets. ``overlap``: reduction may start before backward ends. ``main_grad``: gradients are
    accumulated in fp32. ``invalid``: what differs on the last rank, and must be refused.
    """

    mesh: Mesh
    layers: tuple[Layer, ...] = (Layer(),)
    features: int = 1
    micro_batches: int = 1
    steps: int = 1
    samples: int = 1
    length: int = 1
    counts: tuple[int, ...] = (1,)
    empty: tuple[int, ...] = ()
    skipped: tuple[tuple[int, int, int], ...] = ()
    rotated: bool = False
    axis: str = "dp"
    dtype: str = "fp32"
    loss: Loss = "sum"
    sync: Sync = "last"
    reduction: Reduction = "average"
    reduce_dtype: ReduceDtype = "same"
    bucket: int = 1000
    views: bool = False
    overlap: bool = False
    main_grad: bool = False
    invalid: Invalid | None = None
    recipes: DataParallelRecipes = field(default_factory=DataParallelRecipes)

    def __post_init__(self) -> None:
        format_of(self.dtype)
        if self.axis not in self.mesh.names:
            raise ValueError(f"the axis {self.axis!r} is not in the mesh {self.mesh}")
        for name in ("features", "micro_batches", "steps", "samples", "length", "bucket"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: expected at least 1")
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected one of {', '.join(get_args(kind))}")
        if not self.counts or min(self.counts) < 0 or max(self.counts) > self.length:
            raise ValueError(f"counts {self.counts}: expected one or more from 0 to the length {self.length}")
        if not self.layers or self.layers[0].kind != "own":
            raise ValueError("the first layer must be one that trains: the loss of every rank needs a gradient")
        if any(layer.kind == "tied" and layer.out != self.layers[0].out for layer in self.layers):
            raise ValueError(f"a tied layer has the first layer's {self.layers[0].out} features")
        skipped = [place[0] % len(self.layers) for place in self.skipped]
        wrong = any(min(i, at) < 0 or c < -1 for i, c, at in self.skipped)
        if wrong or 0 in skipped or min(self.empty, default=0) < 0:
            raise ValueError(
                f"skipped {self.skipped}, empty {self.empty}: numbers from 0 on (a coordinate also -1), and not the "
                "first layer"
            )
        if self.reduce_dtype != "same" and self.reduce_dtype not in REDUCIBLE[self.dtype, self.main_grad]:
            raise ValueError(f"gradients in {self.kept.name} are not reduced in {self.reduce_dtype}")
        if self.main_grad and self.format.precision >= 24:
            raise ValueError(f"main_grad is for bf16 and fp16, and the dtype is {self.dtype}")
        if self.invalid and self.parallel_size == 1:
            raise ValueError("one rank cannot differ from others")
        if self.invalid == "order" and len(list(_parameters(self))) < 2:
            raise ValueError("one parameter has no other order")

    @property
    def kept(self) -> Format:
        """That of accumulated gradients."""
        return format_of("fp32") if self.main_grad else self.format

    @property
    def reduced_in(self) -> Format:
        """That in which gradients are sent."""
        return self.kept if self.reduce_dtype == "same" else format_of(self.reduce_dtype)

    @property
    def loss_format(self) -> Format:
        """That of the loss of a token, and of what is made of it."""
        return format_of("fp64" if self.dtype == "fp64" else "fp32")

    def used(self, coordinate: int, k: int) -> tuple[int, ...]:
        """The layers that a rank uses in micro-batch k = step * M + m, in its order."""
        count, n, total = len(self.layers), self.parallel_size, self.steps * self.micro_batches
        left_out = {i % count for i, c, at in self.skipped if at % total == k and (c < 0 or c % n == coordinate)}
        order = [(i + coordinate) % count for i in range(count)] if self.rotated else range(count)
        return tuple(i for i in order if self.layers[i].kind != "unused" and i not in left_out)

    def ever_used(self, i: int, step: int | None = None) -> bool:
        """Whether any rank uses a layer, in a step or at all."""
        steps, M = range(self.steps) if step is None else (step,), self.micro_batches
        pairs = ((c, one * M + m) for c in range(self.parallel_size) for one in steps for m in range(M))
        return any(i in self.used(*pair) for pair in pairs)

    @property
    def exact(self) -> bool:
        """Whether nothing rounds, so that gradients and loss must equal one process bit by bit: whole numbers, small
        enough for every sum, and divided by powers of two alone."""
        if any(getattr(self.recipes, f.name).kind not in EXACT_KINDS for f in fields(self.recipes)):
            return False
        if self.reduction == "average" and not _is_power_of_two(self.parallel_size):
            return False
        if not all(_is_power_of_two(divisor) for step in range(self.steps) for divisor in divisors(self, step)):
            return False
        try:
            lattice_limits(sums(self))
        except ValueError:
            return False
        return True


_CHOICES = {
    "loss": Loss,
    "sync": Sync,
    "reduction": Reduction,
    "reduce_dtype": ReduceDtype,
    "invalid": Literal[None, Invalid],
}
REDUCIBLE: dict[tuple[str, bool], tuple[str, ...]] = {
    ("fp32", False): ("fp32", "bf16"),
    ("fp64", False): (),
    ("bf16", False): ("fp32", "bf16"),
    ("fp16", False): ("fp32",),
    **{(dtype, True): ("fp32", "bf16") for dtype in ("bf16", "fp16")},
    **{(dtype, True): () for dtype in ("fp32", "fp64")},
}


def _is_power_of_two(number: float) -> bool:
    return number == 0 or math.frexp(number)[0] == 0.5


def trained(case: DataParallelCase) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters that get a gradient, by name, in the order in which the network registers them."""
    return {name: shape for name, shape, i in _parameters(case) if case.layers[i].kind != "frozen"}


def frozen(case: DataParallelCase) -> list[str]:
    return [name for name, _, i in _parameters(case) if case.layers[i].kind == "frozen"]


def idle(case: DataParallelCase, step: int | None = None) -> list[str]:
    """Trained parameters that no rank uses, in a step or at all."""
    ties = [i for i, layer in enumerate(case.layers) if layer.kind == "tied"]
    found = []
    for name, _, i in _parameters(case):
        users = [i, *ties] if name == "weight0" else [i]
        if case.layers[i].kind != "frozen" and not any(case.ever_used(user, step) for user in users):
            found.append(name)
    return found


def _parameters(case: DataParallelCase) -> Iterator[tuple[str, tuple[int, ...], int]]:
    for i, layer in enumerate(case.layers):
        if layer.kind != "tied":
            yield f"weight{i}", (layer.out, case.features), i
        if layer.bias:
            yield f"bias{i}", (layer.out,), i


def sums(case: DataParallelCase) -> list[Sum]:
    """The terms of every result, for the lattice bound, in units of the smallest weight of a token."""
    p = min(case.kept.precision, case.reduced_in.precision)
    valid = [valid_tokens(case, step) for step in range(case.steps)]
    spread = case.length if case.loss == "sample_mean" else 1
    of_backward = max(1, spread * max(int(one.sum((3, 4)).max()) for one in valid))
    tokens = max(int(one.sum((0, 2, 3, 4)).max()) for one in valid)
    # A wrapper may average what is reduced already together with what is not, and count it n times on the way.
    tokens *= spread * (case.parallel_size if case.sync == "every" and case.micro_batches > 1 else 1)
    ties = 1 + sum(layer.kind == "tied" for layer in case.layers)
    outs = sum(layer.out for layer in case.layers)
    factors = ("coefficient", "parameter", "input")
    of_token = (Term(outs * case.features, factors), Term(outs, factors[:2]))
    whole = tuple(Term(tokens * term.count, term.factors) for term in of_token)
    of_gradients = [
        Sum((Term(of_backward * ties, ("coefficient", "input")),), case.format.precision),
        Sum((Term(max(1, tokens) * ties, ("coefficient", "input")),), p),
        Sum((Term(max(1, tokens), ("coefficient",)),), p),
    ]
    if case.recipes.parameter.kind == "zeros":  # then so is every loss, and gradients may be larger
        return of_gradients
    return [*of_gradients, Sum(of_token, case.format.precision), Sum(whole, case.loss_format.precision)]


def tensors(case: DataParallelCase) -> Tensors:
    """Every global tensor of the case, float64, filled by its recipe and rounded to the case's dtype."""
    roles = ("input", "parameter", "coefficient")
    limits = dict.fromkeys(roles, LARGEST_USEFUL) | (lattice_limits(sums(case)) if case.exact else {})
    made: Tensors = {}

    def add(name: str, role: str, shape: tuple[int, ...]) -> None:
        made[name] = fill(getattr(case.recipes, role), name, shape, case.format, limits[role])

    for name, shape, _ in _parameters(case):
        add(name, "parameter", shape)
    for i, layer in enumerate(case.layers):
        add(f"coefficient{i}", "coefficient", (layer.out,))
    batch = (case.replicas, case.parallel_size, case.samples, case.length, case.features)
    for k in range(case.steps * case.micro_batches):
        add(f"input[{k}]", "input", batch)
    return made
