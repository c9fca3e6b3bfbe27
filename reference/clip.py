"""Clipping by the global norm of the gradients: the case as data, and what one process computes.

The norm (sum |g|^p)^(1/p), or max |g|, is over the elements of all gradients of the model, each counted once; where it
is above the limit, all gradients are multiplied by limit / norm (Pascanu et al., "On the difficulty of training
recurrent neural networks", ICML 2013, section 3.2). A loss scale is divided out before.

Gradients are flat tensors [size], so that every cut is one of elements:

    gradient{i}   [size], scaled, and after it clipped; ``copy{i}``: the same on the other stage of a tied parameter
    norm          [1], of the gradients without the loss scale, before clipping
    coefficient   [1], by which they were multiplied
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from reference.cases import all_exact
from reference.dtypes import FORMATS, Format, format_of
from reference.lattice import LARGEST_USEFUL, Sum, Term, lattice_limits
from reference.layout import Layout, Rule, Split, window
from reference.mesh import Mesh
from reference.recipe import INJECTIONS, Recipe, fill

Kind = Literal["trained", "frozen", "none", "some"]
NormType = Literal["2", "1", "inf", "3", "1.5"]
Policy = Literal["propagate", "skip", "raise"]
Nonfinite = Literal["inf", "-inf", "nan"]
Invalid = Literal[
    "limit_negative", "limit_zero", "limit_nan", "norm_type_negative", "norm_type_zero", "norm_type_nan",
    "policy_unknown",
]  # fmt: skip
Tensors = dict[str, torch.Tensor]

#: The axes over which parameters lie, and no others.
AXES = ("tp", "pp", "dp")


@dataclass(frozen=True)
class ClipParameter:
    """One parameter, of ``size`` elements. kind: ``frozen`` does not train; ``none``: it has no gradient on any rank;
    ``some``: every second rank along the axis that cuts it, from the second on, has none, which stands for zeros.
    split: its elements are cut over tp. sharded: each rank along dp has its part of them only. stage: which stage of
    the pipeline holds it, modulo their number. tied: the last one, or the first where that holds it, has a copy."""

    size: int = 1
    kind: Kind = "trained"
    split: bool = False
    sharded: bool = False
    stage: int = 0
    tied: bool = False

    def __post_init__(self) -> None:
        if self.size < 1 or self.stage < 0 or self.kind not in get_args(Kind):
            raise ValueError(f"{self}: expected a size of at least 1, a stage from 0, a kind of {get_args(Kind)}")
        if self.kind == "some" and not (self.split or self.sharded):
            raise ValueError(f"{self}: of a parameter that is not cut, no rank can be without a gradient alone")


@dataclass(frozen=True)
class ClipRecipes:
    """How the gradients are filled."""

    gradient: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True)
class ClipCase:
    """Gradients that are clipped.

    ratio: the limit as a share of the norm; the limit is 1 where the norm is zero or not finite. eps: what is added to
    the norm before the limit is divided by it. scale: the exponent of the loss scale, a power of two. magnitude: the
    exponent of the power of two by which all gradients are multiplied. nonfinite: a value that is put at element ``at``
    of parameter ``bad``, both modulo their number; policy: what is to happen then. rule: how elements are cut that the
    ranks do not divide.
    """

    mesh: Mesh
    parameters: tuple[ClipParameter, ...] = (ClipParameter(),)
    dtype: str = "fp32"
    norm_type: NormType = "2"
    ratio: float = 0.5
    eps: float = 0.0
    scale: int = 0
    magnitude: int = 0
    nonfinite: Nonfinite | None = None
    bad: int = 0
    at: int = 0
    policy: Policy = "propagate"
    rule: Rule = "balanced"
    invalid: Invalid | None = None
    recipes: ClipRecipes = field(default_factory=ClipRecipes)

    def __post_init__(self) -> None:
        format_of(self.dtype)
        for name, kind in (("norm_type", NormType), ("policy", Policy), ("rule", Rule)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected one of {', '.join(get_args(kind))}")
        if set(self.mesh.names) - set(AXES):
            raise ValueError(f"the mesh is {self.mesh}: expected axes of {', '.join(AXES)}")
        if not self.parameters or not 0 < self.ratio < math.inf or self.eps < 0 or min(self.bad, self.at) < 0:
            raise ValueError("expected one parameter or more, a ratio above 0, and eps, bad and at from 0")
        if self.nonfinite not in (None, *INJECTIONS) or self.invalid not in (None, *get_args(Invalid)):
            raise ValueError(f"nonfinite {self.nonfinite!r}, invalid {self.invalid!r}: expected known ones")
        if self.nonfinite and not self.has_gradient(self.wrong):
            raise ValueError(f"{self.nonfinite} in a parameter without a gradient: expected another bad")
        if self.nonfinite and self.invalid:
            raise ValueError("expected either nonfinite or invalid")

    @property
    def format(self) -> Format:
        return format_of(self.dtype)

    @property
    def wide(self) -> Format:
        """In which the norm is accumulated, at least."""
        return FORMATS["fp32"] if self.format.precision < 24 else self.format

    @property
    def p(self) -> float:
        return float(self.norm_type)

    @property
    def loss_scale(self) -> float:
        return 2.0**self.scale

    @property
    def wrong(self) -> int:
        """The parameter with the value that is not finite."""
        return self.bad % len(self.parameters)

    @property
    def limit(self) -> float:
        return measured(self)[1]

    @property
    def asked_limit(self) -> float:
        """The limit that a candidate is asked for: in a case that must be refused, maybe not a valid one. So are the
        next two."""
        wrong = {"limit_negative": -1.0, "limit_zero": 0.0, "limit_nan": math.nan}
        return wrong.get(self.invalid or "", self.limit)

    @property
    def asked_norm_type(self) -> float:
        wrong = {"norm_type_negative": -2.0, "norm_type_zero": 0.0, "norm_type_nan": math.nan}
        return wrong.get(self.invalid or "", self.p)

    @property
    def asked_policy(self) -> str:
        return "ignore" if self.invalid == "policy_unknown" else self.policy

    def has_gradient(self, i: int) -> bool:
        """Whether any rank has one."""
        return self.parameters[i].kind in ("trained", "some")

    def stages(self, i: int) -> tuple[int, ...]:
        """The stages that hold parameter i, the one that counts first."""
        p, one = self.mesh.axis_size("pp"), self.parameters[i]
        own = one.stage % p
        other = 0 if own == p - 1 else p - 1
        return (own, other) if one.tied and other != own else (own,)

    def layout(self, i: int, stage: int) -> Layout:
        """How its elements lie on the ranks, of which one stage holds them."""
        one, p = self.parameters[i], self.mesh.axis_size("pp")
        parts = [Split(0, "pp", tuple(one.size * (c == stage) for c in range(p)))]
        parts += [Split(0, "tp", rule=self.rule)] if one.split else []
        parts += [Split(0, "dp", rule=self.rule)] if one.sharded else []
        return tuple(parts)

    def is_without(self, i: int, rank: int) -> bool:
        """Whether this rank has no gradient of a parameter that it holds."""
        one = self.parameters[i]
        axis = "tp" if one.split else "dp"
        alone = one.kind == "some" and self.mesh.coordinate(rank, axis) % 2 == 1
        return alone or not self.has_gradient(i)

    @property
    def exact(self) -> bool:
        """Whether nothing rounds: whole numbers, a norm that is a sum or a maximum, and a coefficient that is 1 or
        another power of two."""
        norm = measured(self)[0]
        if self.norm_type not in ("1", "inf") or not all_exact(self.recipes) or not math.isfinite(norm):
            return False
        if norm and self.ratio * norm < norm + self.eps and (self.eps or math.frexp(self.ratio)[0] != 0.5):
            return False
        return _most(self) is not None


def sums(case: ClipCase) -> list[Sum]:
    """The terms of the norm, and of each gradient, for the lattice bound."""
    elements = sum(one.size for i, one in enumerate(case.parameters) if case.has_gradient(i))
    total = Sum((Term(max(1, elements), ("gradient",)),), case.wide.precision)
    return [total, Sum((Term(1, ("gradient",)),), case.format.precision)]


def _most(case: ClipCase) -> int | None:
    """The largest magnitude of whole numbers whose sum is exact; None where there is none."""
    try:
        return lattice_limits(sums(case))["gradient"]
    except ValueError:
        return None


def tensors(case: ClipCase) -> Tensors:
    """The gradients as they are handed over, [size], float64: filled, multiplied, zero where a rank has none."""
    made: Tensors = {}
    most = _most(case) or LARGEST_USEFUL
    for i, one in enumerate(case.parameters):
        if not case.has_gradient(i):
            continue
        name, fmt = f"gradient{i}", case.format
        values = fill(case.recipes.gradient, name, (one.size,), fmt, most) * 2.0**case.magnitude
        values = values.to(fmt.torch_dtype).to(torch.float64)
        for rank in range(case.mesh.size):
            if case.is_without(i, rank):
                window((one.size,), case.layout(i, case.stages(i)[0]), case.mesh, rank).take(values).zero_()
        if case.nonfinite and i == case.wrong:
            _inject(case, i, values)
        made[name] = values
    return made


def _inject(case: ClipCase, i: int, values: torch.Tensor) -> None:
    """At an element that some rank has a gradient of."""
    there = torch.zeros(values.shape, dtype=torch.bool)
    for rank in range(case.mesh.size):
        if not case.is_without(i, rank):
            window(tuple(values.shape), case.layout(i, case.stages(i)[0]), case.mesh, rank).take(there).fill_(True)
    places = there.nonzero().view(-1)
    if places.numel():
        values[places[case.at % places.numel()]] = INJECTIONS[str(case.nonfinite)]


@functools.lru_cache(maxsize=64)
def measured(case: ClipCase) -> tuple[float, float]:
    """The norm, and the limit that follows from it."""
    norm = float(norm_of(case, tensors(case)))
    return norm, case.ratio * norm if 0 < norm < math.inf else 1.0


def norm_of(case: ClipCase, given: Tensors) -> torch.Tensor:
    """Of the gradients without the loss scale. Powers of two keep squares within range, as a good implementation has
    to: they change no rounding."""
    unit = 2.0 ** (case.magnitude - case.scale)
    values = [given[f"gradient{i}"] / 2.0**case.magnitude for i in with_gradient(case)]
    flat = torch.cat([torch.zeros(1, dtype=torch.float64), *values]).abs()
    if case.norm_type == "inf":
        return flat.max() * unit
    if case.norm_type == "1":
        return flat.sum() * unit
    if case.norm_type == "2":
        return (flat * flat).sum().sqrt() * unit
    return (flat**case.p).sum() ** (1 / case.p) * unit


def with_gradient(case: ClipCase) -> list[int]:
    """The parameters of which some rank has a gradient."""
    return [i for i in range(len(case.parameters)) if case.has_gradient(i)]


def names(case: ClipCase, i: int) -> tuple[str, ...]:
    """Of a gradient, on each stage that holds it."""
    return (f"gradient{i}", f"copy{i}")[: len(case.stages(i))]


def held(case: ClipCase, i: int, rank: int) -> str | None:
    """The name of a gradient on a rank; None where it has no such parameter."""
    at = case.mesh.coordinate(rank, "pp")
    found = dict(zip(case.stages(i), names(case, i), strict=True))
    return found.get(at)


def local(case: ClipCase, given: Tensors, i: int, rank: int) -> torch.Tensor:
    """A rank's elements of gradient i as they are handed over, float64; zeros where it has none, and of length 0 where
    it holds none."""
    whole = given.get(f"gradient{i}", torch.zeros(case.parameters[i].size, dtype=torch.float64))
    stage = case.mesh.coordinate(rank, "pp")
    stage = stage if stage in case.stages(i) else case.stages(i)[0]
    return window(tuple(whole.shape), case.layout(i, stage), case.mesh, rank).take(whole).clone()


def has_empty_piece(case: ClipCase) -> bool:
    """Whether a rank holds a parameter with gradients, and no element of it."""
    return any(
        held(case, i, rank) is not None and not local(case, {}, i, rank).numel()
        for i in with_gradient(case)
        for rank in range(case.mesh.size)
    )
