"""Steps of a mixed-precision optimizer: the case as data, and what follows from it without any arithmetic of the step.

Model parameters in a low format have masters in fp32 that are updated; gradients come multiplied by a loss scale, and
where any of them overflows, every rank skips the step (Micikevicius et al., "Mixed Precision Training", arXiv
1710.03740, section 3). What one process computes is in `reference.mixed_precision_steps`.

Parameters are flat tensors [size], so that every cut is one of elements; n ranks along dp:

    parameter{i}       [size], alike on all replicas
    gradient{i}[step]  [n, size], without the loss scale
    reloaded{i}        [size], the weights that are loaded into the model in the middle
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from reference.cases import all_exact
from reference.dtypes import FORMATS, Format, format_of
from reference.lattice import Sum, Term, lattice_limits
from reference.layout import Layout, Rule, Split, window
from reference.loss_scale import Scaling, Value
from reference.mesh import Mesh
from reference.mixed_precision_parts import Group, MixedParameter, Overflow
from reference.recipe import Recipe

Optimizer = Literal["sgd", "adamw"]
Invalid = Literal["dtype", "lr_negative", "state_optimizer", "state_shape", "state_scaler", "state_truncated"]

#: The axes over which parameters lie, and no others.
AXES = ("tp", "pp", "dp")
#: What is wrong with the state to load.
OF_STATE: tuple[Invalid, ...] = ("state_optimizer", "state_shape", "state_scaler", "state_truncated")
DTYPES = ("fp32", "bf16", "fp16")
UNSCALED = Scaling("constant", 1.0)


@dataclass(frozen=True)
class MixedPrecisionRecipes:
    """How each tensor of the case is filled."""

    parameter: Recipe = field(default_factory=Recipe)
    gradient: Recipe = field(default_factory=Recipe)
    reloaded: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True)
class MixedPrecisionCase:
    """Steps of an optimizer of parameters in ``dtype``, with masters and state in fp32.

    groups: of parameters, each with its learning rate. optimizer: as torch.optim's SGD (with ``momentum``) and AdamW
    (with ``betas`` and ``adam_eps``). warmup: the learning rate of the t-th step that is not skipped, from 0, is
    multiplied by (t + 1) / warmup below it; 0 for a constant one. main_grad: gradients come in fp32, in ``main_grad``,
    and else in the parameter's dtype, in ``grad``. sharded: masters and state are cut over the dp ranks. clip: the
    limit of the global 2-norm as a share of what it is in the first step, 0 for none; clip_eps is added to the norm
    before the limit is divided by it. scaling: of the loss. overflows: beside those that come of a large scale in fp16.
    reload: before this step the weights of the model are replaced, by themselves; 0 for never. load: before this step
    the whole state is saved, and a new optimizer loads it; 0 for never. relaunch: that one is in new processes, which
    have nothing but the parameters and the state. rule: how elements are cut that the tp ranks do not divide. invalid:
    what must be refused.
    """

    mesh: Mesh
    parameters: tuple[MixedParameter, ...] = (MixedParameter(),)
    groups: tuple[Group, ...] = (Group(),)
    dtype: str = "fp32"
    optimizer: Optimizer = "sgd"
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    warmup: int = 0
    main_grad: bool = False
    sharded: bool = False
    clip: float = 0.0
    clip_eps: float = 0.0
    scaling: Scaling = UNSCALED
    steps: int = 1
    overflows: tuple[Overflow, ...] = ()
    reload: int = 0
    load: int = 0
    relaunch: bool = False
    rule: Rule = "balanced"
    invalid: Invalid | None = None
    recipes: MixedPrecisionRecipes = field(default_factory=MixedPrecisionRecipes)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}: expected one of {', '.join(DTYPES)}")
        for name, kind in (("optimizer", Optimizer), ("rule", Rule), ("invalid", Literal[None, Invalid])):
            if getattr(self, name) not in get_args(kind) and getattr(self, name) not in _flat(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected one of {_flat(kind)}")
        if set(self.mesh.names) - set(AXES) or (self.sharded and "dp" not in self.mesh.names):
            raise ValueError(f"the mesh is {self.mesh}: expected axes of {', '.join(AXES)}, and dp where sharded")
        if not self.trained or not self.groups:
            raise ValueError("expected one parameter that trains, or more, and one group or more")
        if any(one.lr < 0 or one.weight_decay < 0 for one in self.groups) or min(self.warmup, self.clip_eps) < 0:
            raise ValueError("expected learning rates, weight decays, warmup and clip_eps from 0")
        if not 0 <= self.clip < math.inf or self.adam_eps <= 0:
            raise ValueError(f"clip is {self.clip} and adam_eps {self.adam_eps}: expected one from 0, and one above it")
        if not all(0 <= x < 1 for x in (*self.betas, self.momentum)):
            raise ValueError(f"betas are {self.betas} and momentum {self.momentum}: expected from 0 to below 1")
        for name in ("load", "reload"):
            if self.steps < 1 or not 0 <= getattr(self, name) < self.steps + (getattr(self, name) == 0):
                raise ValueError(
                    f"{name} {getattr(self, name)} of {self.steps} steps: expected 0, or less than the steps, from 1"
                )
        if self.relaunch and not self.load:
            raise ValueError("relaunch without a load: expected the step before which the state is loaded")
        if self.dtype == "fp32" and (self.main_grad or any(one.fp32 for one in self.parameters)):
            raise ValueError("main_grad and parameters in fp32 are for bf16 and fp16, and the dtype is fp32")
        self._refuse_scales_and_overflows()

    def _refuse_scales_and_overflows(self) -> None:
        self.scaling.require_valid()
        dynamic = self.scaling.kind == "dynamic"
        lowest = self.scaling.initial * (self.scaling.backoff_factor**self.steps if dynamic else 1)
        factors = (self.scaling.growth_factor, self.scaling.backoff_factor, self.scaling.initial)
        if max(lowest, self.scaling.minimum) < 1 or any(math.frexp(x)[0] != 0.5 for x in factors):
            raise ValueError(f"{self.scaling}: expected powers of two, and no scale below 1 after {self.steps} steps")
        for one in self.overflows:
            if set(one.axes) - set(self.mesh.names) or one.step >= self.steps:
                raise ValueError(f"{one}: expected axes of the mesh {self.mesh}, and one of {self.steps} steps")

    @property
    def format(self) -> Format:
        return format_of(self.dtype)

    @property
    def replicas(self) -> int:
        """n"""
        return self.mesh.axis_size("dp")

    @property
    def trained(self) -> tuple[int, ...]:
        return tuple(i for i, one in enumerate(self.parameters) if one.kind != "frozen")

    @property
    def states(self) -> tuple[str, ...]:
        """The state tensors that are kept for each element."""
        if self.optimizer == "adamw":
            return "exp_avg", "exp_avg_sq"
        return ("momentum",) if self.momentum else ()

    @property
    def asked_groups(self) -> tuple[Group, ...]:
        """Those that a candidate is asked for: in a case that must be refused, not valid ones."""
        if self.invalid != "lr_negative":
            return self.groups
        return tuple(replace(one, lr=-1.0) for one in self.groups)

    @property
    def other(self) -> MixedPrecisionCase:
        """Another configuration, whose state must be refused."""
        if self.invalid == "state_optimizer":
            made = replace(self, optimizer="sgd" if self.optimizer == "adamw" else "adamw", momentum=0.0)
        elif self.invalid == "state_scaler":
            constant = self.scaling.kind == "constant"
            initial = self.scaling.initial * (2 if constant else 1)
            growth = self.scaling.growth_factor * (1 if constant else 2)
            made = replace(self, scaling=replace(self.scaling, initial=initial, growth_factor=growth))
        else:
            first = self.trained[0]
            grown = tuple(
                replace(one, size=one.size + self.mesh.size) if i == first else one
                for i, one in enumerate(self.parameters)
            )
            made = replace(self, parameters=grown)
        return replace(made, invalid=None)

    def group_of(self, i: int) -> int:
        return self.parameters[i].group % len(self.groups)

    def format_of(self, i: int) -> Format:
        """That of parameter i in the model."""
        return FORMATS["fp32"] if self.parameters[i].fp32 else self.format

    def handed_in(self, i: int) -> Format:
        """That in which its gradient is handed over."""
        return FORMATS["fp32"] if self.main_grad else self.format_of(i)

    def has_master(self, i: int) -> bool:
        """Whether a master is kept beside the parameter."""
        return self.parameters[i].kind != "frozen" and self.format_of(i).precision < 24

    def has_gradient(self, i: int, coordinate: int, step: int) -> bool:
        """coordinate: along dp."""
        kind = self.parameters[i].kind
        return kind == "trained" or (kind == "some" and coordinate % 2 == 0) or (kind == "first" and step == 0)

    def stages(self, i: int) -> tuple[int, ...]:
        """The stages that hold parameter i, the one that counts first."""
        p, one = self.mesh.axis_size("pp"), self.parameters[i]
        own = one.stage % p
        other = 0 if own == p - 1 else p - 1
        return (own, other) if one.tied and other != own else (own,)

    def holds(self, i: int, rank: int) -> bool:
        return self.mesh.coordinate(rank, "pp") in self.stages(i)

    def layout(self, i: int, stage: int) -> Layout:
        """How its elements lie on the ranks, of which one stage holds them."""
        one, p = self.parameters[i], self.mesh.axis_size("pp")
        parts = [Split(0, "pp", tuple(one.size * (c == stage) for c in range(p)))]
        return tuple(parts + ([Split(0, "tp", rule=self.rule)] if one.split else []))

    def window(self, i: int, rank: int) -> slice:
        """The elements of parameter i that this rank holds; none where its stage is another."""
        stage = self.mesh.coordinate(rank, "pp")
        stage = stage if stage in self.stages(i) else self.stages(i)[0]
        ((start, length),) = window((self.parameters[i].size,), self.layout(i, stage), self.mesh, rank).ranges
        return slice(start, start + length)

    def factor(self, t: int) -> float:
        """By which learning rates are multiplied in a step; t: of how many before it none was skipped."""
        return min(1.0, (t + 1) / self.warmup) if self.warmup else 1.0

    def hits(self, rank: int, step: int) -> Iterator[tuple[int, int, Value]]:
        """Parameter, local element and value of each overflow that is put into this rank's gradients."""
        for one in self.overflows:
            if one.step != step or not one.event.hits(self.mesh, rank):
                continue
            there = [i for i in self.trained if self._has_elements(i, rank, step)]
            if there:
                i = there[one.parameter % len(there)]
                held = self.window(i, rank)
                yield i, one.element % (held.stop - held.start), one.value

    def _has_elements(self, i: int, rank: int, step: int) -> bool:
        held = self.window(i, rank)
        return held.stop > held.start and self.has_gradient(i, self.mesh.coordinate(rank, "dp"), step)

    @property
    def exact(self) -> bool:
        """Whether nothing but the model's weights rounds: whole numbers, learning rates and divisors that are powers of
        two, and an update that is only a sum."""
        plain = all(one.weight_decay == 0 and _is_power(one.lr) for one in self.groups)
        if self.optimizer != "sgd" or self.momentum or self.clip or not plain or not all_exact(self.recipes):
            return False
        if not _is_power(1 / self.replicas) or not (self.warmup == 0 or _is_power(1 / self.warmup)):
            return False
        try:
            lattice_limits(sums(self))
        except ValueError:
            return False
        return True


def _is_power(x: float) -> bool:
    """Of two, at most 1, or zero."""
    return x == 0 or (x <= 1 and math.frexp(x)[0] == 0.5)


def _flat(kind: object) -> tuple[object, ...]:
    return tuple(value for one in get_args(kind) for value in (get_args(one) or (one,)))


def sums(case: MixedPrecisionCase) -> list[Sum]:
    """The terms of every result, for the lattice bound, in units of the smallest part of a gradient that is added."""
    finest = case.replicas * max((round(1 / one.lr) for one in case.groups if one.lr), default=1) * max(1, case.warmup)
    values = Term(finest, ("parameter",)), Term(finest, ("reloaded",))
    total = Sum((*values, Term(finest * case.steps, ("gradient",))), FORMATS["fp32"].precision)
    each = [Sum((Term(1, (name,)),), case.format.precision) for name in ("parameter", "reloaded", "gradient")]
    return [total, *each]
