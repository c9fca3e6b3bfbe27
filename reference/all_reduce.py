"""Reductions over a group of ranks: the case as data, and what one process computes.

n ranks along ``axis``; R groups of them, one for each coordinate along the other axes. L the elements of a tensor. In a
piece each rank has its part of L elements in one row, cut in balance.

| operation | input[m] | output[m] |
|---|---|---|
| all_reduce | one of ``shape`` on every rank | the reduced one, alike on all n |
| reduce_scatter | one of ``shape`` on every rank | a piece of the reduced one |
| all_gather | a piece | [L], alike on all n |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from reference.cases import AlongAxis
from reference.dtypes import FORMATS, Format, format_of
from reference.lattice import Sum, Term, lattice_limits
from reference.layout import Each, Layout, Rule, Split
from reference.mesh import Mesh
from reference.precision import computed_in, rounded_to
from reference.recipe import EXACT_KINDS, Recipe, fill

Operation = Literal["all_reduce", "reduce_scatter", "all_gather"]
#: Whose bytes are counted; ``library``: one collective of a library, whatever that does inside.
Algorithm = Literal["library", "ring", "halving_doubling", "tree", "parameter_server"]
Reduction = Literal["sum", "avg", "max", "min"]
#: How several tensors are handed over: in one call, or one after the other, each begun before the first is waited for.
Calls = Literal["together", "handles"]
#: What is wrong with a case that must be refused: on the last rank of every group a tensor is one element longer, has
#: another dtype, stands in another place, or is one too many; or, on all ranks, an unknown reduction or the mean of
#: whole numbers is asked for.
Invalid = Literal["", "length", "dtype", "order", "number", "reduction", "integers"]
Tensors = dict[str, torch.Tensor]

_CHOICES = {"operation": Operation, "algorithm": Algorithm, "reduction": Reduction, "calls": Calls, "invalid": Invalid}


@dataclass(frozen=True)
class AllReduceRecipes:
    """How the tensors of the case are filled."""

    input: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True)
class AllReduceCase(AlongAxis):
    """One reduction along ``axis`` of each of several tensors, all in flight at a time.

    shapes: of each tensor; a dimension may be 0. dtype: of the tensors. accumulate_fp32: sums of bf16 and fp16 are
    kept, and travel, in fp32, and are rounded once. transposed: the inputs are not contiguous. in_place: results are
    written into the inputs. check: the ranks make sure first that they ask for the same. late: the last rank of every
    group begins a little after the others, who may then do what they like with their inputs and results.
    """

    mesh: Mesh
    operation: Operation = "all_reduce"
    algorithm: Algorithm = "library"
    reduction: Reduction = "sum"
    shapes: tuple[tuple[int, ...], ...] = ((1,),)
    axis: str = "tp"
    dtype: str = "fp32"
    accumulate_fp32: bool = False
    transposed: bool = False
    in_place: bool = False
    calls: Calls = "together"
    check: bool = True
    late: bool = False
    invalid: Invalid = ""
    recipes: AllReduceRecipes = field(default_factory=AllReduceRecipes)

    def __post_init__(self) -> None:
        format_of(self.dtype)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                expected = ", ".join(map(repr, get_args(choices)))
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected one of {expected}")
        if self.axis not in self.mesh.names:
            raise ValueError(f"the reduction's axis {self.axis!r} is not in the mesh {self.mesh}")
        if not self.shapes or any(min(shape, default=0) < 0 for shape in self.shapes):
            raise ValueError(f"shapes {self.shapes}: expected one or more, of dimensions of at least 0")
        self._refuse_what_does_not_go_together()
        if self.exact:
            limit(self)  # refuses more ranks than a format can count

    def _refuse_what_does_not_go_together(self) -> None:
        pieces = self.operation != "all_reduce"
        if pieces and (self.algorithm not in ("library", "ring") or self.in_place or self.calls == "handles"):
            raise ValueError(
                f"{self.operation} by {self.algorithm}, in_place={self.in_place}, calls={self.calls!r}: on its own it "
                "is expected by a ring or library, into new tensors, together"
            )
        if self.operation == "all_gather" and (self.reduction != "sum" or self.accumulate_fp32):
            raise ValueError("an all_gather reduces nothing: expected reduction='sum' and no accumulate_fp32")
        if self.invalid and (self.operation != "all_reduce" or not self.check or self.parallel_size == 1):
            raise ValueError(f"invalid {self.invalid!r}: expected a checked all_reduce of two ranks or more")
        if self.invalid == "number" and self.calls == "handles":
            raise ValueError(
                "invalid 'number' with handles: a call that a rank does not make can be seen by no other call"
            )
        if self.invalid == "order" and len({math.prod(shape) for shape in self.shapes}) < 2:
            raise ValueError(f"invalid 'order' of shapes {self.shapes}: expected two of different lengths")

    @property
    def kept(self) -> Format:
        """The format in which partial sums are kept, and travel."""
        wide = self.accumulate_fp32 and self.reduction in ("sum", "avg") and self.format.precision < 24
        return FORMATS["fp32"] if wide else self.format

    @property
    def exact(self) -> bool:
        """Whether nothing rounds but a last time, so that every right implementation has the same bits."""
        if self.operation == "all_gather" or self.reduction in ("max", "min"):
            return True
        n = self.parallel_size
        divides = self.reduction == "sum" or n & (n - 1) == 0
        return divides and self.recipes.input.kind in EXACT_KINDS

    @property
    def asks(self) -> str:
        """The reduction that is asked for, which is none in a case that must be refused for that."""
        return {"reduction": "median", "integers": "avg"}.get(self.invalid, self.reduction)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The elements of each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)


def layouts(case: AllReduceCase, rule: Rule = "balanced") -> dict[str, Layout]:
    """How ``input`` and ``output`` are held."""
    each = Each(case.replica_axes)
    own: Layout = (Each(case.mesh.names),)
    piece: Layout = (each, Split(0, case.axis, rule=rule))
    return {
        "input": piece if case.operation == "all_gather" else own,
        "output": piece if case.operation == "reduce_scatter" else (each,),
    }


def global_shape(case: AllReduceCase, role: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of ``input`` or ``output``: one tensor for each rank where it is its own, else for each of the R."""
    if role == "input" and case.operation != "all_gather":
        return (case.mesh.size, *shape)
    groups = case.mesh.size // case.parallel_size
    return (groups, *shape) if case.operation == "all_reduce" else (groups, math.prod(shape))


def limit(case: AllReduceCase) -> int:
    """The largest magnitude of lattice data: its sum does not round where it is kept, so only at the end, if at all."""
    if case.kept != case.format:
        return int(2**case.format.precision)  # n times that is exact in fp32 for any n that there is
    return lattice_limits([Sum((Term(case.parallel_size, ("input",)),), case.format.precision)])["input"]


def tensors(case: AllReduceCase) -> Tensors:
    """Every global tensor of the case, float64, filled by its recipe and rounded to the case's dtype."""
    most = limit(case) if case.exact else 31
    return {
        f"input[{m}]": fill(case.recipes.input, f"input[{m}]", global_shape(case, "input", shape), case.format, most)
        for m, shape in enumerate(case.shapes)
    }


def expected(case: AllReduceCase, given: Tensors) -> dict[str, torch.Tensor | None]:
    """What one process has of each output, float64. A NaN stays one in every reduction."""
    out: dict[str, torch.Tensor | None] = {}
    for m, shape in enumerate(case.shapes):
        x = given[f"input[{m}]"]
        if case.operation != "all_gather":
            x = _reduced(case, by_group(case, x))
        out[f"output[{m}]"] = x.reshape(global_shape(case, "output", shape))
    return out


def by_group(case: AllReduceCase, x: torch.Tensor) -> torch.Tensor:
    """[ranks, ...] -> [R, n, ...]"""
    ranks = range(case.mesh.size)
    own = torch.tensor([case.mesh.coordinate(rank, case.mesh.names) for rank in ranks])
    shared = torch.tensor([case.mesh.coordinate(rank, case.replica_axes) for rank in ranks])
    order = torch.argsort(shared, stable=True)
    return x[own[order]].unflatten(0, (-1, case.parallel_size))  # type: ignore[no-any-return, no-untyped-call]


def _reduced(case: AllReduceCase, x: torch.Tensor) -> torch.Tensor:
    """[R, n, ...] -> [R, ...]: reduced in the format that is kept, a sum then divided there and rounded once."""
    if case.reduction in ("max", "min"):
        return x.amax(1) if case.reduction == "max" else x.amin(1)
    with computed_in(case.kept.name):
        total = x.sum(1)
        if case.reduction == "avg":
            total = total / case.parallel_size
    if case.kept == case.format:
        return total
    if case.exact:  # this last rounding too is the same everywhere
        return total.to(case.format.torch_dtype).to(torch.float64)
    return rounded_to(case.dtype)(total)
