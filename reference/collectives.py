"""Differentiable collectives and their conjugates: the case as data, and what one process computes.

D is the dimension that is cut or joined; n the ranks along ``axis``, R all others, one tensor each.

| kind | enters | leaves | gradient in | gradient out |
|---|---|---|---|---|
| copy | whole, alike on all n | the same | each rank's own | their sum |
| reduce | each rank's own | their sum, alike on all n | alike on all n | the same |
| scatter | whole, alike on all n | cut along D | cut along D | joined |
| gather | cut along D | joined, alike on all n | alike on all n | cut along D |
| gather_sequence | cut along D | joined, alike on all n | each rank's own | their sum, cut along D |
| reduce_scatter | each rank's own | their sum, cut along D | cut along D | joined |

(Megatron-LM's f and g, arXiv 1909.08053, section 3; sequence parallelism, arXiv 2205.05198, section 4.2.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from reference.cases import AlongAxis, all_exact
from reference.dtypes import format_of
from reference.lattice import LARGEST_USEFUL, Sum, Term, lattice_limits
from reference.layout import Each, Layout, Rule, Split
from reference.linear import Backward
from reference.mesh import Mesh
from reference.recipe import Recipe, fill

Kind = Literal["copy", "reduce", "scatter", "gather", "gather_sequence", "reduce_scatter"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: How a tensor is held: ``alike`` on all n ranks, ``cut`` along D, or each rank's ``own``.
Held = Literal["alike", "cut", "own"]
_ENTERS: dict[Kind, Held] = {
    "copy": "alike",
    "reduce": "own",
    "scatter": "alike",
    "gather": "cut",
    "gather_sequence": "cut",
    "reduce_scatter": "own",
}
_LEAVES: dict[Kind, Held] = {
    "copy": "own",  # the values are alike, and the gradients are each rank's own
    "reduce": "alike",
    "scatter": "cut",
    "gather": "alike",
    "gather_sequence": "own",
    "reduce_scatter": "cut",
}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class CollectivesRecipes:
    """How each tensor of the case is filled."""

    input: Recipe = field(default_factory=Recipe)
    output_grad: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True)
class CollectivesCase(AlongAxis):
    """One collective along ``axis``, forward and backward on each of ``shapes``, the whole shapes of the tensors.

    ``dim``, negative from the last, is cut or joined. The rest as in `reference.linear.LinearCase`.
    """

    mesh: Mesh
    kind: Kind
    shapes: tuple[tuple[int, ...], ...] = ((1,),)
    dim: int = -1
    axis: str = "tp"
    dtype: str = "fp32"
    input_requires_grad: bool = True
    transposed: bool = False
    backward: Backward = "immediate"
    recipes: CollectivesRecipes = field(default_factory=CollectivesRecipes)

    def __post_init__(self) -> None:
        format_of(self.dtype)
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}: expected one of {', '.join(KINDS)}")
        if self.axis not in self.mesh.names:
            raise ValueError(f"the collective's axis {self.axis!r} is not in the mesh {self.mesh}")
        if not self.shapes or any(not shape or min(shape) < 1 for shape in self.shapes):
            raise ValueError(f"shapes {self.shapes}: expected one or more, of dimensions of at least 1")
        if any(not -len(shape) <= self.dim < 0 for shape in self.shapes):
            least = -min(map(len, self.shapes))
            raise ValueError(f"dim {self.dim} is not in every one of {self.shapes}: expected one of {least} to -1")
        if self.backward not in get_args(Backward):
            raise ValueError(f"backward is {self.backward!r}: expected one of {', '.join(get_args(Backward))}")
        if self.exact:
            lattice_limits(sums(self))

    @property
    def exact(self) -> bool:
        """Whether no sum rounds, so that results must equal one process bit by bit."""
        return all_exact(self.recipes)

    @property
    def trains(self) -> bool:
        return self.input_requires_grad and self.backward != "never"


def layouts(case: CollectivesCase, rule: Rule = "balanced") -> dict[str, Layout]:
    """How ``input`` and ``output``, and their gradients, are held."""
    return {"input": _layout(case, _ENTERS[case.kind], rule), "output": _layout(case, _LEAVES[case.kind], rule)}


def _layout(case: CollectivesCase, held: Held, rule: Rule) -> Layout:
    if held == "own":
        return (Each(case.mesh.names),)
    each = Each(case.replica_axes)
    return (each, Split(case.dim, case.axis, rule=rule)) if held == "cut" else (each,)


def global_shape(case: CollectivesCase, role: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of ``input`` or ``output``: one tensor for each rank where it is its own, else for each of the R."""
    held = (_ENTERS if role == "input" else _LEAVES)[case.kind]
    return (case.mesh.size if held == "own" else case.mesh.size // case.parallel_size, *shape)


def sums(case: CollectivesCase) -> list[Sum]:
    """The terms of every result, for the lattice bound."""
    n, p = case.parallel_size, case.format.precision
    return [Sum((Term(n, ("input",)),), p), Sum((Term(n, ("output_grad",)),), p)]


def tensors(case: CollectivesCase) -> Tensors:
    """Every global tensor of the case, float64, filled by its recipe and rounded to the case's dtype."""
    limits = lattice_limits(sums(case)) if case.exact else dict.fromkeys(("input", "output_grad"), LARGEST_USEFUL)
    made: Tensors = {}
    for m, shape in enumerate(case.shapes):
        for name, role, recipe in (
            (f"input[{m}]", "input", case.recipes.input),
            (f"output[{m}].grad", "output", case.recipes.output_grad),
        ):
            limit = limits["input" if role == "input" else "output_grad"]
            made[name] = fill(recipe, name, global_shape(case, role, shape), case.format, limit)
    return made


def expected(case: CollectivesCase, given: Tensors) -> dict[str, torch.Tensor | None]:
    """Outputs and input gradients of one process, float64, each as `layouts` says."""
    out: dict[str, torch.Tensor | None] = {}
    for m in range(len(case.shapes)):
        out[f"output[{m}]"] = _forward(case, given[f"input[{m}]"])
        out[f"input[{m}].grad"] = _backward(case, given[f"output[{m}].grad"]) if case.trains else None
    return out


def _forward(case: CollectivesCase, x: torch.Tensor) -> torch.Tensor:
    """A whole tensor that is cut or joined is the same tensor, looked at as a whole."""
    if _ENTERS[case.kind] == "own":
        x = _summed(case, x)
    return _of_every_rank(case, x) if _LEAVES[case.kind] == "own" else x


def _backward(case: CollectivesCase, grad: torch.Tensor) -> torch.Tensor:
    if _LEAVES[case.kind] == "own":
        grad = _summed(case, grad)
    return _of_every_rank(case, grad) if _ENTERS[case.kind] == "own" else grad


def _places(case: CollectivesCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every rank, its index among all and among the R."""
    ranks = range(case.mesh.size)
    own = [case.mesh.coordinate(rank, case.mesh.names) for rank in ranks]
    shared = [case.mesh.coordinate(rank, case.replica_axes) for rank in ranks]
    return torch.tensor(own), torch.tensor(shared)


def _summed(case: CollectivesCase, x: torch.Tensor) -> torch.Tensor:
    """[ranks, ...] -> [R, ...], over the ranks along the axis."""
    own, shared = _places(case)
    order = torch.argsort(shared, stable=True)
    return x[own[order]].unflatten(0, (-1, case.parallel_size)).sum(1)  # type: ignore[no-any-return, no-untyped-call]


def _of_every_rank(case: CollectivesCase, x: torch.Tensor) -> torch.Tensor:
    """[R, ...] -> [ranks, ...]"""
    own, shared = _places(case)
    return x[shared[torch.argsort(own)]]
