"""Vocabulary-parallel embedding: the case as data, and what one process computes.

Shapes: R replicas (one for each coordinate outside the layer's axis, with data of its own), ``leading`` the token
dimensions of a micro-batch, V rows of the table (the vocabulary and its padding), H hidden.

    input[m]     [R, *leading], int64       output[m]    [R, *leading, H]
    weight       [V, H]                     weight.grad  [R, V, H], summed over micro-batches
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import torch

from reference.cases import AlongAxis, all_exact, exponent, totals
from reference.dtypes import format_of
from reference.ids import Ids, fill_ids
from reference.lattice import LARGEST_USEFUL, Sum, Term, lattice_limits
from reference.layout import cut
from reference.linear import Backward
from reference.mesh import Mesh
from reference.precision import computed_in
from reference.recipe import Recipe, fill

#: What is wrong with the ids of a case that must be refused: one of them is below zero, or beyond the vocabulary.
Invalid = Literal["", "negative", "past"]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class EmbeddingRecipes:
    """How each tensor of the case is filled."""

    weight: Recipe = field(default_factory=Recipe)
    output_grad: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True)
class EmbeddingCase(AlongAxis):
    """A table of ``vocabulary`` rows and ``padding`` more, cut over the ranks along ``axis``, looked up forward and
    backward for each micro-batch.

    ``padding`` rows belong to no token: they make the table divisible, and get no gradient. ``padding_idx`` is a token
    whose row gets no gradient. ``sequence_parallel`` leaves the output cut along the first token dimension. ``ids``
    says how the tokens are chosen. ``invalid`` puts one id out of range into the first micro-batch, which every rank
    must refuse. The rest as in `reference.linear.LinearCase`.
    """

    mesh: Mesh
    vocabulary: int
    hidden: int
    leading: tuple[tuple[int, ...], ...] = ((1,),)
    axis: str = "tp"
    dtype: str = "fp32"
    padding: int = 0
    padding_idx: int | None = None
    sequence_parallel: bool = False
    explicit_group: bool = False
    weight_requires_grad: bool = True
    main_grad: bool = False
    transposed: bool = False
    backward: Backward = "immediate"
    invalid: Invalid = ""
    init: bool = False
    ids: Ids = field(default_factory=Ids)
    recipes: EmbeddingRecipes = field(default_factory=EmbeddingRecipes)

    def __post_init__(self) -> None:
        format_of(self.dtype)
        if self.axis not in self.mesh.names:
            raise ValueError(f"the layer's axis {self.axis!r} is not in the mesh {self.mesh}")
        if self.vocabulary < self.parallel_size:
            raise ValueError(
                f"vocabulary {self.vocabulary} on {self.parallel_size} ranks: expected at least one row a rank"
            )
        if self.hidden < 1 or self.padding < 0:
            raise ValueError(f"hidden {self.hidden} must be at least 1 and padding {self.padding} at least 0")
        if self.padding_idx is not None and not 0 <= self.padding_idx < self.vocabulary:
            raise ValueError(f"padding_idx {self.padding_idx}: expected a token from 0 to {self.vocabulary - 1}")
        if not self.leading or any(not dims or min(dims) < 1 for dims in self.leading):
            raise ValueError(f"leading {self.leading}: expected one or more micro-batches of dimensions of at least 1")
        if self.axis != "tp" and not self.explicit_group:
            raise ValueError(f"axis {self.axis!r} is not the default group: the layer must be given an explicit group")
        if self.init and self.invalid:
            raise ValueError(
                f"init and invalid={self.invalid!r}: a case compares initial values or is refused, not both"
            )
        for name, kinds in (("backward", get_args(Backward)), ("invalid", get_args(Invalid))):
            if getattr(self, name) not in kinds:
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected one of {', '.join(map(repr, kinds))}")
        if self.exact:
            lattice_limits(sums(self))  # refuses sizes that cannot be exact

    @property
    def rows(self) -> int:
        """Of the whole table."""
        return self.vocabulary + self.padding

    @property
    def exact(self) -> bool:
        """Whether no sum rounds, so that results must equal one process bit by bit."""
        return all_exact(self.recipes)

    @property
    def trains(self) -> bool:
        return self.weight_requires_grad and self.backward != "never"


def sums(case: EmbeddingCase) -> list[Sum]:
    """The terms of every result, for the lattice bound."""
    tokens, p = [math.prod(dims) for dims in case.leading], case.format.precision
    output = Sum((Term(1, ("weight",)),), p)
    total = totals(case.format, case.main_grad, tokens)
    return [output, *(Sum((Term(n, ("output_grad",)),), q) for n, q in ((max(tokens), p), total))]


def tensors(case: EmbeddingCase) -> Tensors:
    """Every global tensor of the case: ids int64, the others float64, filled by recipe and rounded to the dtype."""
    limits = lattice_limits(sums(case)) if case.exact else dict.fromkeys(("weight", "output_grad"), LARGEST_USEFUL)
    made = {"weight": fill(case.recipes.weight, "weight", (case.rows, case.hidden), case.format, limits["weight"])}
    borders = np.cumsum([0, *cut(case.rows, case.parallel_size)[:-1]]).tolist()
    for m, dims in enumerate(case.leading):
        ids = fill_ids(case.ids, f"input[{m}]", (case.replicas, *dims), case.vocabulary, borders)
        if case.invalid and m == 0:
            ids.view(case.replicas, -1)[:, -1] = -1 if case.invalid == "negative" else case.vocabulary
        made[f"input[{m}]"] = ids
        name, shape = f"output[{m}].grad", (case.replicas, *dims, case.hidden)
        grad = fill(case.recipes.output_grad, name, shape, case.format, limits["output_grad"])
        scaled = grad * 2.0 ** exponent(case.format, case.main_grad, m)
        made[name] = scaled.to(case.format.torch_dtype).to(torch.float64)
    return made


def expected(case: EmbeddingCase, given: Tensors) -> dict[str, torch.Tensor | None]:
    """Outputs and the table's gradient of one process, float64; None where there must be no gradient.

    y = W[ids]; dL/dW[v] is the sum of g over the tokens that are v, zero for ``padding_idx`` and rows of no token.
    """
    out: dict[str, torch.Tensor | None] = {}
    totals = []
    for m, dims in enumerate(case.leading):
        ids_RT = given[f"input[{m}]"].flatten(1)
        g_RTH = given[f"output[{m}].grad"].flatten(1, -2)
        out[f"output[{m}]"] = given["weight"][ids_RT].reshape(case.replicas, *dims, case.hidden)
        if case.padding_idx is not None:
            g_RTH = torch.where((ids_RT == case.padding_idx).unsqueeze(-1), 0.0, g_RTH)
        replica_R1 = torch.arange(case.replicas).unsqueeze(-1)
        zeros = torch.zeros(case.replicas * case.rows, case.hidden, dtype=torch.float64)
        rows = (replica_R1 * case.rows + ids_RT).flatten()
        totals.append(zeros.index_add(0, rows, g_RTH.flatten(0, 1)).view(case.replicas, case.rows, case.hidden))
    out["weight.grad"] = _total(case, totals) if case.trains else None
    return out


def _total(case: EmbeddingCase, micro_batches: list[torch.Tensor]) -> torch.Tensor:
    with computed_in("fp32" if case.main_grad and case.dtype != "fp64" else case.dtype):
        # As one sum: micro-batches may come in any order, and what overflows in one may not in another.
        return torch.stack(micro_batches).sum(0)
