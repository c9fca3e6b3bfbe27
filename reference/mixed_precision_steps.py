"""What one process makes of a mixed-precision case: which steps are skipped, the scale, and all values after each.

parameter{i}[step], master{i}[step], {kind}{i}[step]   [size], after the step; ``.copy`` before the bracket: on the
                                                        other stage of a tied parameter
norm[step], coefficient[step]                           [1], of steps that are not skipped, where gradients are
                                                        clipped
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from reference.data_parallel_gradients import over_ranks
from reference.dtypes import FORMATS
from reference.lattice import LARGEST_USEFUL, lattice_limits
from reference.loss_scale import ScalerState, after, begin
from reference.mixed_precision import MixedPrecisionCase, sums
from reference.optimizers import adamw, sgd
from reference.precision import computed_in, rounded_to
from reference.recipe import fill

Tensors = dict[str, torch.Tensor]


def tensors(case: MixedPrecisionCase) -> Tensors:
    """Every global tensor of the case, float64, filled by its recipe and rounded to its dtype."""
    roles = ("parameter", "gradient", "reloaded")
    limits = lattice_limits(sums(case)) if case.exact else dict.fromkeys(roles, LARGEST_USEFUL)
    made: Tensors = {}
    for i, one in enumerate(case.parameters):
        for role in ("parameter", "reloaded") if case.reload else ("parameter",):
            recipe = getattr(case.recipes, role)
            made[f"{role}{i}"] = fill(recipe, f"{role}{i}", (one.size,), case.format_of(i), limits[role])
    for step in range(case.steps):
        for i in case.trained:
            has = [case.has_gradient(i, coordinate, step) for coordinate in range(case.replicas)]
            if any(has):
                name, shape = f"gradient{i}[{step}]", (case.replicas, case.parameters[i].size)
                values = fill(case.recipes.gradient, name, shape, case.handed_in(i), limits["gradient"])
                made[name] = values * torch.tensor(has, dtype=torch.float64).unsqueeze(1)
    return made


def gradient(case: MixedPrecisionCase, given: Tensors, i: int, step: int) -> torch.Tensor:
    """Of every replica, [n, size], without the loss scale; zeros where it has none."""
    none = torch.zeros(case.replicas, case.parameters[i].size, dtype=torch.float64)
    return given.get(f"gradient{i}[{step}]", none)


def handed(case: MixedPrecisionCase, given: Tensors, i: int, step: int, rank: int, scale: float) -> torch.Tensor:
    """A rank's own elements of a gradient as they are handed over: scaled, in their dtype, with what overflows."""
    own = gradient(case, given, i, step)[case.mesh.coordinate(rank, "dp"), case.window(i, rank)]
    values = (own * scale).to(case.handed_in(i).torch_dtype)
    for index, element, value in case.hits(rank, step):
        if index == i:
            values[element] = float(value)
    return values


@dataclass(frozen=True)
class Planned:
    """One step. scale: by which its gradients are multiplied. skipped: whether any overflows. after: the scaler's state
    after it. t: how many steps before it were not skipped."""

    scale: float
    skipped: bool
    after: ScalerState
    t: int


def plan(case: MixedPrecisionCase, given: Tensors) -> tuple[Planned, ...]:
    """What every rank must decide in each step. Only comparisons: nothing of it depends on rounding."""
    return tuple(_planned(case, given))


def _planned(case: MixedPrecisionCase, given: Tensors) -> Iterator[Planned]:
    state, t = begin(case.scaling), 0
    for step in range(case.steps):
        scale = state.scale
        skipped = any(
            case.holds(i, rank) and not bool(handed(case, given, i, step, rank, scale).isfinite().all())
            for rank in range(case.mesh.size)
            for i in case.trained
        )
        state = after(case.scaling, state, skipped)
        yield Planned(scale, skipped, state, t)
        t += not skipped


@functools.lru_cache(maxsize=64)
def limit(case: MixedPrecisionCase) -> float:
    """The largest norm that gradients may have, where they are clipped."""
    given = tensors(case)
    flat = [gradient(case, given, i, 0).mean(0) for i in case.trained]
    norm = float(torch.linalg.vector_norm(torch.cat(flat)))
    return case.clip * norm or 1.0


def names(case: MixedPrecisionCase, kind: str, i: int, step: int) -> tuple[str, ...]:
    """Of a tensor of parameter i after a step, on each stage that holds it, in the order of `stages`."""
    return (f"{kind}{i}[{step}]", f"{kind}{i}.copy[{step}]")[: len(case.stages(i))]


@dataclass(frozen=True)
class Changed:
    """A known mistake. remade: masters are made anew from the rounded model, ``before`` each step or ``after`` it.
    decays: the state of an optimizer goes on in steps that are skipped, as if gradients were zeros. rate_counts,
    moments_count: steps that are skipped count for the learning rate, and where Adam's moments are corrected for their
    start. unlimited: gradients within the limit are scaled up to it. norm_scaled: the norm is that of the gradients
    before they are divided by the scale.
    """

    remade: Literal[None, "before", "after"] = None
    decays: bool = False
    rate_counts: bool = False
    moments_count: bool = False
    unlimited: bool = False
    norm_scaled: bool = False


_RIGHT = Changed()


def expected(
    case: MixedPrecisionCase, given: Tensors, plans: Sequence[Planned], change: Changed = _RIGHT
) -> dict[str, torch.Tensor | None]:
    """All values after each step, float64. plans: as of `plan`, made before, as rounding does not decide them. change:
    a mistake that is made."""
    out: dict[str, torch.Tensor | None] = {}
    masters = {i: given[f"parameter{i}"] for i in range(len(case.parameters))}
    model = dict(masters)
    zeros = torch.zeros((), dtype=torch.float64)
    states = {i: {kind: zeros.expand(case.parameters[i].size) for kind in case.states} for i in case.trained}
    for step, planned in enumerate(plans):
        if case.reload and step == case.reload:
            model = {i: given[f"reloaded{i}"] for i in model}
            masters = dict(model)
        if change.remade == "before":
            masters = {i: _remade(case, i, values) for i, values in model.items()}
        if not planned.skipped:
            gradients = {i: _reduced(case, given, i, step) for i in case.trained}
            if case.clip:
                out |= _clipped(case, gradients, step, planned.scale, change)
            t = step if change.rate_counts else planned.t
            made = step if change.moments_count else planned.t
            for i in case.trained:
                masters[i], states[i] = _updated(case, i, masters[i], gradients[i], states[i], t, made)
                model[i] = _stored(case, i, masters[i])
        elif change.decays:
            for i in case.trained:
                none = torch.zeros_like(masters[i])
                states[i] = _updated(case, i, masters[i], none, states[i], planned.t, planned.t)[1]
        if change.remade == "after":
            masters = {i: _remade(case, i, values) for i, values in masters.items()}
        for i in range(len(case.parameters)):
            found = {"parameter": model[i]}
            found |= {"master": masters[i]} if case.has_master(i) else {}
            for kind, values in {**found, **states.get(i, {})}.items():
                out |= {name: values.clone() for name in names(case, kind, i, step)}
    return out


def _reduced(case: MixedPrecisionCase, given: Tensors, i: int, step: int) -> torch.Tensor:
    """The mean over the replicas, [size], in fp32: scaling by powers of two rounds nothing."""
    return over_ranks(gradient(case, given, i, step), 0, "fp32", case.replicas)


def _remade(case: MixedPrecisionCase, i: int, values: torch.Tensor) -> torch.Tensor:
    """What the model holds of it, really rounded."""
    return values.to(case.format_of(i).torch_dtype).to(torch.float64) if case.has_master(i) else values


def _clipped(
    case: MixedPrecisionCase, gradients: dict[int, torch.Tensor], step: int, scale: float, change: Changed
) -> Tensors:
    """Clips the gradients, and returns their norm before and the coefficient."""
    norm, coefficient = clipping(list(gradients.values()), limit(case), case.clip_eps)
    if change.norm_scaled:
        norm = norm * scale
        coefficient = torch.clamp(limit(case) / (norm + case.clip_eps), max=1.0)
    if change.unlimited and norm:
        coefficient = limit(case) / (norm + case.clip_eps)
    with computed_in("fp32"):
        for i in gradients:
            gradients[i] = gradients[i] * coefficient
    return {f"norm[{step}]": norm.view(1), f"coefficient[{step}]": coefficient.view(1)}


def clipping(gradients: Sequence[torch.Tensor], most: float, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The 2-norm of flat gradients, and by what they are multiplied so that it is at most ``most``, both scalars.
    Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013, section 3.2."""
    with computed_in("fp32"):
        flat = torch.cat(list(gradients))
        norm = (flat * flat).sum().sqrt()
        # The limit may be reached by rounding only: then both are right, and nearly alike. A norm of zero gives 1.
        return norm, torch.clamp(most / (norm + eps), max=1.0)


def _updated(
    case: MixedPrecisionCase, i: int, values: torch.Tensor, gradient: torch.Tensor, state: Tensors, t: int, made: int
) -> tuple[torch.Tensor, Tensors]:
    """In fp32. With a learning rate of 0 the values are those before, whatever the state does. t: how many steps count
    for the learning rate; made: and for the correction of Adam's moments."""
    group = case.groups[case.group_of(i)]
    lr, decay = group.lr * case.factor(t), group.weight_decay
    with computed_in("fp32"):
        if case.optimizer == "adamw":
            new, state = adamw(values, gradient, state, made + 1, lr, case.betas, case.adam_eps, decay)
        else:
            new, state = sgd(values, gradient, state, made + 1, lr, case.momentum, decay)
    return (new if lr else values), state


def _stored(case: MixedPrecisionCase, i: int, master: torch.Tensor) -> torch.Tensor:
    """The master rounded to the model's format: really where nothing else rounds, and else by what is estimated."""
    fmt = case.format_of(i)
    if fmt == FORMATS["fp32"]:
        return master
    if case.exact:
        return master.to(fmt.torch_dtype).to(torch.float64)
    return rounded_to(fmt.name)(master)
