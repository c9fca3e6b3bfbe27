"""A sharded optimizer: the case as data, and what one process computes with the reduced gradient.

Shapes: R replica groups (one for each coordinate outside the axis, with gradients of their own), n ranks along the
axis. Where a state moves to another axis, all replicas are alike, and R is 1; n is then the size of the step's axis.

    parameter{i}         [*shape], alike everywhere
    gradient{i}[step]    [R, n, *shape]
    parameter{i}[step]   [R, *shape], after the step
    {kind}{i}[step]      [R, elements]: state tensors ``momentum``, ``exp_avg``, ``exp_avg_sq``, after the step
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from reference.cases import AlongAxis, all_exact
from reference.data_parallel_gradients import over_ranks
from reference.dtypes import Format, format_of
from reference.lattice import LARGEST_USEFUL, Sum, Term, lattice_limits
from reference.mesh import Mesh
from reference.optimizers import adamw, sgd
from reference.precision import computed_in, rounded_to
from reference.recipe import Recipe, fill

Kind = Literal["trained", "frozen", "some", "none", "first"]
Optimizer = Literal["sgd", "adamw"]
Reduction = Literal["average", "sum"]
ReduceDtype = Literal["same", "fp32"]
Invalid = Literal["number", "shape", "dtype", "order", "empty", "state_number", "state_shape", "state_optimizer"]
Tensors = dict[str, torch.Tensor]

#: What is wrong with the state to load, and not with the parameters.
OF_STATE: tuple[Invalid, ...] = ("state_number", "state_shape", "state_optimizer")


@dataclass(frozen=True)
class Parameter:
    """One parameter. fp32: whatever the case's dtype. kind: ``frozen`` does not train; ``some``: on every second rank
    along the axis, from the second on, it has no gradient, which stands for zeros; ``none``: on no rank; ``first``: it
    has one in the first step alone."""

    shape: tuple[int, ...] = (1,)
    fp32: bool = False
    kind: Kind = "trained"

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.shape):
            raise ValueError(f"a parameter of shape {self.shape}: expected sizes of at least 1")
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind is {self.kind!r}: expected one of {', '.join(get_args(Kind))}")

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardedOptimizerRecipes:
    """How each tensor of the case is filled."""

    parameter: Recipe = field(default_factory=Recipe)
    gradient: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True)
class ShardedOptimizerCase(AlongAxis):
    """Steps of an optimizer whose state is sharded over the ranks along ``axis``; each has gradients of its own.

    ``optimizer``: as torch.optim's SGD (with ``momentum``) and AdamW (with ``betas`` and ``eps``). ``reduction``: of
    the ranks' gradients, in ``reduce_dtype``. ``master``: bf16 and fp16 parameters are kept, and updated, in fp32.
    ``load``: after so many steps the state is saved, and a new optimizer loads it and goes on; 0 for never.
    ``load_axis``: along which axis that one is sharded, by default the same. ``relaunch``: it is in new processes,
    which have nothing but the parameters and the state. ``invalid``: what must be refused:
    parameters that differ on the last rank, an empty list, or a state of other parameters or of another optimizer.
    """

    mesh: Mesh
    parameters: tuple[Parameter, ...] = (Parameter(),)
    axis: str = "dp"
    dtype: str = "fp32"
    optimizer: Optimizer = "sgd"
    lr: float = 1.0
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    steps: int = 1
    reduction: Reduction = "average"
    reduce_dtype: ReduceDtype = "same"
    master: bool = False
    load: int = 0
    load_axis: str | None = None
    relaunch: bool = False
    invalid: Invalid | None = None
    recipes: ShardedOptimizerRecipes = field(default_factory=ShardedOptimizerRecipes)

    def __post_init__(self) -> None:
        format_of(self.dtype)
        for axis in (self.axis, self.load_axis or self.axis):
            if axis not in self.mesh.names:
                raise ValueError(f"the axis {axis!r} is not in the mesh {self.mesh}")
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected one of {', '.join(get_args(kind))}")
        if not any(one.kind != "frozen" for one in self.parameters):
            raise ValueError("no parameter trains: expected one or more (an empty list is invalid='empty')")
        if self.steps < 1 or not 0 <= self.load < self.steps + (self.load == 0):
            raise ValueError(
                f"load {self.load} of {self.steps} steps: expected 0, or less than the steps, of at least 1"
            )
        if self.load_axis == self.axis or (self.load_axis and not self.load):
            raise ValueError(f"load_axis {self.load_axis!r}: expected another axis than {self.axis!r}, and a load")
        if self.relaunch and not self.load:
            raise ValueError("relaunch without a load: expected after how many steps the state is loaded")
        low = self.format.precision < 24
        if (self.master or self.reduce_dtype == "fp32") and not low:
            raise ValueError(f"master and reduce_dtype='fp32' are for bf16 and fp16, and the dtype is {self.dtype}")
        if self.optimizer == "adamw" and self.dtype == "fp16" and not self.master:
            raise ValueError("AdamW in fp16 is expected with master: squares of gradients leave its range")
        if self.lr <= 0 or self.eps <= 0 or not all(0 <= x < 1 for x in (*self.betas, self.momentum)):
            raise ValueError("expected lr and eps above 0, and betas and momentum from 0 to below 1")
        self._refuse_what_is_not_invalid()

    def _refuse_what_is_not_invalid(self) -> None:
        if self.invalid in OF_STATE and not self.load:
            raise ValueError(f"invalid {self.invalid!r}: expected a load")
        if self.invalid == "state_optimizer" and self.dtype == "fp16" and not self.master:
            raise ValueError("invalid 'state_optimizer' in fp16: expected master, without which there is no AdamW")
        if self.invalid in ("number", "shape", "dtype", "order") and self.parallel_size == 1:
            raise ValueError("one rank cannot differ from others")
        if self.invalid == "order" and len({(p.shape, p.fp32, p.kind == "frozen") for p in self.parameters}) < 2:
            raise ValueError("invalid 'order': expected parameters that can be told apart")

    def format_of(self, i: int) -> Format:
        """That of parameter i."""
        return format_of("fp32") if self.parameters[i].fp32 else self.format

    def kept(self, i: int) -> Format:
        """That in which parameter i is updated, and its state is kept."""
        own = self.format_of(i)
        return format_of("fp32") if self.master and own.precision < 24 else own

    def sent(self, i: int) -> Format:
        """That in which its gradient is reduced."""
        own = self.format_of(i)
        return format_of("fp32") if self.reduce_dtype == "fp32" and own.precision < 24 else own

    def axis_at(self, step: int) -> str:
        """The axis along which the optimizer of a step is sharded."""
        return self.load_axis if self.load_axis and step >= self.load else self.axis

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes whose coordinates have gradients of their own."""
        return () if self.load_axis else self.replica_axes

    @property
    def groups(self) -> int:
        """R"""
        return 1 if self.load_axis else self.replicas

    @property
    def trained(self) -> tuple[int, ...]:
        return tuple(i for i, one in enumerate(self.parameters) if one.kind != "frozen")

    @property
    def states(self) -> tuple[str, ...]:
        """The state tensors that are kept for each element."""
        if self.optimizer == "adamw":
            return "exp_avg", "exp_avg_sq"
        return ("momentum",) if self.momentum else ()

    def has_gradient(self, i: int, coordinate: int, step: int) -> bool:
        kind = self.parameters[i].kind
        return kind == "trained" or (kind == "some" and coordinate % 2 == 0) or (kind == "first" and step == 0)

    @property
    def exact(self) -> bool:
        """Whether nothing rounds: whole numbers, a learning rate and divisors that are powers of two, and an update
        that is only a sum."""
        divides = self.lr <= 1 and math.frexp(self.lr)[0] == 0.5 and not self.momentum and not self.weight_decay
        if self.optimizer != "sgd" or not divides or not all_exact(self.recipes):
            return False
        if any(math.frexp(divisor)[0] != 0.5 for divisor in _divisors(self)):
            return False
        try:
            lattice_limits(sums(self))
        except ValueError:
            return False
        return True


_CHOICES = {
    "optimizer": Optimizer,
    "reduction": Reduction,
    "reduce_dtype": ReduceDtype,
    "invalid": Literal[None, Invalid],
}


def _divisors(case: ShardedOptimizerCase) -> list[int]:
    """By what the gradients of each step are divided."""
    sizes = [case.mesh.axis_size(case.axis_at(step)) for step in range(case.steps)]
    return [size if case.reduction == "average" else 1 for size in sizes]


def sums(case: ShardedOptimizerCase) -> list[Sum]:
    """The terms of every result, for the lattice bound, in units of the smallest part of a gradient that is added."""
    finest = max(_divisors(case)) * round(1 / case.lr)
    ranks = [case.mesh.axis_size(case.axis_at(step)) for step in range(case.steps)]
    # Of averages the units are n times finer, and a rank's share may be rounded before the sum.
    added = finest * sum(ranks)
    p = min(f.precision for i in case.trained for f in (case.format_of(i), case.kept(i), case.sent(i)))
    return [Sum((Term(finest, ("parameter",)), Term(added, ("gradient",))), p)]


def tensors(case: ShardedOptimizerCase) -> Tensors:
    """Every global tensor of the case, float64, filled by its recipe and rounded to its dtype."""
    roles = ("parameter", "gradient")
    limits = lattice_limits(sums(case)) if case.exact else dict.fromkeys(roles, LARGEST_USEFUL)
    made: Tensors = {}
    for i, one in enumerate(case.parameters):
        fmt, name = case.format_of(i), f"parameter{i}"
        made[name] = fill(case.recipes.parameter, name, one.shape, fmt, limits["parameter"])
    for step in range(case.steps):
        n = case.mesh.axis_size(case.axis_at(step))
        for i in case.trained:
            if case.parameters[i].kind != "none" and (case.parameters[i].kind != "first" or step == 0):
                name, shape = f"gradient{i}[{step}]", (case.groups, n, *case.parameters[i].shape)
                made[name] = fill(case.recipes.gradient, name, shape, case.format_of(i), limits["gradient"])
    return made


def expected(case: ShardedOptimizerCase, given: Tensors) -> dict[str, torch.Tensor | None]:
    """Parameters and state of one process after each step, float64."""
    out: dict[str, torch.Tensor | None] = {}
    for i, one in enumerate(case.parameters):
        start = given[f"parameter{i}"].expand(case.groups, *one.shape)
        if one.kind == "frozen":
            out |= {f"parameter{i}[{step}]": start for step in range(case.steps)}
            continue
        gradients = (reduced(case, given, i, step) for step in range(case.steps))
        for step, (values, state) in enumerate(updated(case, i, start, gradients)):
            rounds = case.kept(i) != case.format_of(i)
            out[f"parameter{i}[{step}]"] = rounded_to(case.format_of(i).name)(values) if rounds else values
            out |= {f"{kind}{i}[{step}]": x.reshape(case.groups, -1) for kind, x in state.items()}
    return out


def local_gradients(case: ShardedOptimizerCase, given: Tensors, i: int, step: int) -> torch.Tensor:
    """[R, n, *shape], zeros where a rank has none."""
    n, one = case.mesh.axis_size(case.axis_at(step)), case.parameters[i]
    if one.kind == "none" or (one.kind == "first" and step > 0):
        return torch.zeros(case.groups, n, *one.shape, dtype=torch.float64)
    there = torch.tensor([float(case.has_gradient(i, c, step)) for c in range(n)], dtype=torch.float64)
    return given[f"gradient{i}[{step}]"] * there.view(n, *[1] * len(one.shape))


def reduced(case: ShardedOptimizerCase, given: Tensors, i: int, step: int) -> torch.Tensor:
    """The gradient with which one process steps, [R, *shape], in the format that is kept."""
    locals_ = local_gradients(case, given, i, step)
    total = over_ranks(locals_, 1, case.sent(i).name, locals_.shape[1] if case.reduction == "average" else 1)
    return rounded_to(case.kept(i).name)(total)


def updated(
    case: ShardedOptimizerCase, i: int, values: torch.Tensor, gradients: Iterator[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, Tensors]]:
    """Values and state after each step."""
    state = {kind: torch.zeros_like(values) for kind in case.states}
    for t, gradient in enumerate(gradients, start=1):
        with computed_in(case.kept(i).name):
            if case.optimizer == "adamw":
                options = case.lr, case.betas, case.eps, case.weight_decay
                values, state = adamw(values, gradient, state, t, *options)
            else:
                values, state = sgd(values, gradient, state, t, case.lr, case.momentum, case.weight_decay)
        yield values, state
