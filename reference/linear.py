"""Column- and row-parallel linear layers: the case as data, and what one process computes.

Shapes: R replicas (one for each coordinate outside the layer's axis, with data of its own), ``leading`` the token
dimensions of a micro-batch, I in_features, O out_features.

    input[m]        [R, *leading, I]     output[m]       [R, *leading, O]
    weight          [O, I]               weight.grad     [R, O, I], summed over micro-batches
    bias            [O]                  bias.grad       [R, O]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from reference.cases import AlongAxis, all_exact, exponent, totals
from reference.dtypes import format_of
from reference.lattice import LARGEST_USEFUL, Sum, Term, lattice_limits
from reference.mesh import Mesh
from reference.precision import computed_in
from reference.recipe import Recipe, fill

Kind = Literal["column", "row"]
#: When the backward of a micro-batch runs: right after its forward; after all forwards, the first or the last
#: micro-batch first; or never, and then forward runs under torch.no_grad().
Backward = Literal["immediate", "delayed", "reversed", "never"]
Tensors = dict[str, torch.Tensor]
_ROLES = ("input", "weight", "bias", "output_grad")


@dataclass(frozen=True)
class LinearRecipes:
    """How each tensor of the case is filled."""

    input: Recipe = field(default_factory=Recipe)
    weight: Recipe = field(default_factory=Recipe)
    bias: Recipe = field(default_factory=Recipe)
    output_grad: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True)
class LinearCase(AlongAxis):
    """One linear layer cut over the ranks along ``axis``, run forward and backward on each micro-batch.

    ``leading`` lists the token dimensions of each micro-batch. ``sequence_parallel`` cuts the first of them over the
    ranks, before a column layer and after a row layer. ``explicit_group`` hands the layer its process group instead
    of leaving it to the default. ``main_grad`` asks for gradients accumulated in fp32 in a buffer beside the parameter.
    ``weight_at_call`` passes the weight to forward. ``backward`` says when the micro-batches' backwards run.
    ``init`` compares the initial parameters with a one-process run.
    """

    mesh: Mesh
    kind: Kind
    in_features: int
    out_features: int
    leading: tuple[tuple[int, ...], ...] = ((1,),)
    axis: str = "tp"
    dtype: str = "fp32"
    bias: bool = False
    skip_bias_add: bool = False
    gather_output: bool = False
    input_is_parallel: bool = True
    sequence_parallel: bool = False
    explicit_group: bool = False
    input_requires_grad: bool = True
    weight_requires_grad: bool = True
    bias_requires_grad: bool = True
    main_grad: bool = False
    weight_at_call: bool = False
    transposed: bool = False
    backward: Backward = "immediate"
    init: bool = False
    recipes: LinearRecipes = field(default_factory=LinearRecipes)

    def __post_init__(self) -> None:
        format_of(self.dtype)
        if self.axis not in self.mesh.names:
            raise ValueError(f"the layer's axis {self.axis!r} is not in the mesh {self.mesh}")
        if self.in_features < 1 or self.out_features < 1:
            raise ValueError(f"in_features {self.in_features} and out_features {self.out_features} must be at least 1")
        if not self.leading or any(not dims or min(dims) < 1 for dims in self.leading):
            raise ValueError(f"leading {self.leading}: expected one or more micro-batches of dimensions of at least 1")
        if self.axis != "tp" and not self.explicit_group:
            raise ValueError(f"axis {self.axis!r} is not the default group: the layer must be given an explicit group")
        if self.sequence_parallel and (self.gather_output or not self.input_is_parallel):
            raise ValueError("sequence_parallel goes with neither gather_output nor input_is_parallel=False")
        if self.exact:
            lattice_limits(sums(self))  # refuses sizes that cannot be exact
        if self.backward not in get_args(Backward):
            expected = ", ".join(get_args(Backward))
            raise ValueError(f"backward is {self.backward!r}: expected one of {expected}")
        if self.skip_bias_add and not self.bias:
            raise ValueError("skip_bias_add goes only with bias: there is none to return")

    @property
    def exact(self) -> bool:
        """Whether no sum rounds, so that results must equal one process bit by bit."""
        return all_exact(self.recipes)

    @property
    def trained(self) -> frozenset[str]:
        """Which of input, weight and bias get a gradient."""
        asked = {"input": self.input_requires_grad, "weight": self.weight_requires_grad}
        asked["bias"] = self.bias and self.bias_requires_grad
        return frozenset(name for name, wanted in asked.items() if wanted and self.backward != "never")


def sums(case: LinearCase) -> list[Sum]:
    """The terms of every result, for the lattice bound: all sums of forward and backward."""
    p, tokens = case.format.precision, [_tokens(dims) for dims in case.leading]
    total, kept = totals(case.format, case.main_grad, tokens)  # of one micro-batch each is in the dtype
    return [
        Sum((Term(case.in_features, ("input", "weight")), Term(1, ("bias",))), p),
        Sum((Term(case.out_features, ("output_grad", "weight")),), p),
        *(
            Sum((Term(count, factors),), precision)
            for factors in (("output_grad", "input"), ("output_grad",))
            for count, precision in ((max(tokens), p), (total, kept))
        ),
    ]


def tensors(case: LinearCase) -> Tensors:
    """Every global tensor of the case, float64, filled by its recipe and rounded to the case's dtype."""
    # Beside data that rounds, lattice data need not be so small that every sum is exact.
    limits = lattice_limits(sums(case)) if case.exact else dict.fromkeys(_ROLES, LARGEST_USEFUL)
    made: Tensors = {}

    def add(name: str, role: str, shape: tuple[int, ...]) -> None:
        recipe: Recipe = getattr(case.recipes, role)
        made[name] = fill(recipe, name, shape, case.format, limits[role])

    add("weight", "weight", (case.out_features, case.in_features))
    if case.bias:
        add("bias", "bias", (case.out_features,))
    for m, dims in enumerate(case.leading):
        add(f"input[{m}]", "input", (case.replicas, *dims, case.in_features))
        add(f"output[{m}].grad", "output_grad", (case.replicas, *dims, case.out_features))
        scaled = made[f"output[{m}].grad"] * 2.0 ** exponent(case.format, case.main_grad, m)
        made[f"output[{m}].grad"] = scaled.to(case.format.torch_dtype).to(torch.float64)
    return made


def expected(case: LinearCase, given: Tensors) -> dict[str, torch.Tensor | None]:
    """Outputs and gradients of one process, float64; None where there must be no gradient.

    y = x W^T + b, dL/dx = g W, dL/dW = g^T x, dL/db = sum of g, written out so that nothing rests on autograd.
    With ``skip_bias_add`` the caller adds the returned bias, so the gradients are the same.
    """
    weight, bias, trained = given["weight"], given.get("bias"), case.trained
    out: dict[str, torch.Tensor | None] = {}
    weight_grads, bias_grads = [], []
    for m in range(len(case.leading)):
        x_RTI = given[f"input[{m}]"].flatten(1, -2)
        g_RTO = given[f"output[{m}].grad"].flatten(1, -2)
        y_RTO = x_RTI @ weight.T
        if bias is not None and not case.skip_bias_add:
            y_RTO = y_RTO + bias
        elif bias is not None:
            out[f"output_bias[{m}]"] = bias.expand(case.replicas, -1)
        bias_grads.append(g_RTO.sum(1))
        shape = given[f"input[{m}]"].shape
        out[f"output[{m}]"] = y_RTO.reshape(*shape[:-1], case.out_features)
        out[f"input[{m}].grad"] = (g_RTO @ weight).reshape(shape) if "input" in trained else None
        weight_grads.append(g_RTO.transpose(1, 2) @ x_RTI)
    out["weight.grad"] = _total(case, weight_grads) if "weight" in trained else None
    if bias is not None:
        out["bias.grad"] = _total(case, bias_grads) if "bias" in trained else None
    return out


def _total(case: LinearCase, micro_batches: list[torch.Tensor]) -> torch.Tensor:
    """The sum over micro-batches, in fp32 at least where there is a main gradient."""
    kept = "fp32" if case.main_grad and case.dtype != "fp64" else case.dtype
    with computed_in(kept):
        # As one sum: micro-batches may come in any order, and what overflows in one may not in another.
        return torch.stack(micro_batches).sum(0)


def _tokens(dims: tuple[int, ...]) -> int:
    count = 1
    for n in dims:
        count *= n
    return count
