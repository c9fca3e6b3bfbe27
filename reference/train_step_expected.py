"""What one process computes in a case of training steps: which are skipped, the scale, and all values.

Where the dtype is low, every master is stored in it before the next step. To what it rounds is not decided here: where
it is near the middle of two numbers, rounding before it decides, and so it is estimated, as all rounding is. Where a
step is to be skipped is decided, in float64: cases in which rounding decides are refused, see `Undecided`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from reference.data_parallel_gradients import over_ranks
from reference.gpt_dropout import Masks
from reference.gpt_parameters import EMBEDDING, OUTPUT, tensors
from reference.gpt_step import divisors, loss_of, of_ranks, units
from reference.largest import Largest
from reference.loss_scale import after, begin
from reference.mixed_precision_steps import Planned, clipping
from reference.optimizers import adamw, sgd
from reference.precision import computed_in, rounded_to
from reference.train_step import TrainStepCase

Tensors = dict[str, torch.Tensor]

#: A gradient is said to overflow, or not to, where it is beyond the format's largest number by this factor: far more
#: than rounding, and the order of a sum, can do to it.
_MARGIN = 4.0


class Undecided(ValueError):
    """Whether a step of the case overflows is decided by rounding: the case is not to be drawn."""


@dataclass(frozen=True)
class Changed:
    """A known mistake. scaled: gradients are multiplied by the loss scale to this power. times: and by this.
    tied_twice: a tied embedding is twice in the norm. added: gradients are added to those of the steps before. anew:
    before this step all state is set to zero."""

    scaled: int = 0
    times: float = 1.0
    tied_twice: bool = False
    added: bool = False
    anew: int = 0


_RIGHT = Changed()


@dataclass
class Model:
    """What is trained, step by step: values, [shape], masters and state tensors by name, of every parameter but a tied
    output. change: a mistake that is made."""

    case: TrainStepCase
    change: Changed
    values: Tensors
    masters: Tensors
    states: dict[str, Tensors]
    kept: Sequence[Masks] = ()

    @staticmethod
    def of(case: TrainStepCase, given: Tensors, change: Changed = _RIGHT, kept: Sequence[Masks] = ()) -> Model:
        made = Model(case, change, dict(given), dict(given), {}, kept)
        made.begin()
        return made

    def begin(self) -> None:
        """All state is zero."""
        self.states = {
            name: {kind: torch.zeros_like(x) for kind in self.case.states} for name, x in self.values.items()
        }

    def gradients(self, step: int, scale: float) -> tuple[Tensors, torch.Tensor]:
        """Of each data-parallel rank, [D, *shape], of the scaled loss, in which ranks have the share that becomes their
        mean; and the loss, [1]."""
        batch, D = self.case.batch(step), 1 if self.case.is_alone(step) else self.case.ranks_of_data
        with computed_in(batch.loss_format.name):
            by = divisors(batch) / (scale * D)
        parts, shares = units(batch, self.values, by, self.kept[step] if self.kept else {})
        if self.case.is_alone(step):
            parts = {name: part.flatten(1, 2).unsqueeze(1) for name, part in parts.items()}
        found = of_ranks(batch, parts)
        with computed_in(batch.loss_format.name):
            loss = loss_of(batch, shares)[0] / (scale * D)
        return {name: found[name][0] for name in self.values}, loss

    def loss(self, step: int) -> torch.Tensor:
        """That of a step that is skipped."""
        return self.gradients(step, 1.0)[1]

    def step(self, gradients: Tensors, planned: Planned) -> Tensors:
        """Updates all values; returns what was found on the way, by name."""
        case, change, found = self.case, self.change, Tensors()
        means = {name: over_ranks(gradient, 0, "fp32", gradient.shape[0]) for name, gradient in gradients.items()}
        with computed_in("fp32"):
            means = {name: gradient / planned.scale for name, gradient in means.items()}
        if change != _RIGHT:
            means = {name: x * change.times * planned.scale**change.scaled for name, x in means.items()}
        if case.clip:
            flat = [means[name].flatten() for name in self._counted()]
            norm, coefficient = clipping(flat, case.clip, case.clip_eps)
            found = {"norm": norm.view(1), "coefficient": coefficient.view(1)}
            with computed_in("fp32"):
                means = {name: gradient * coefficient for name, gradient in means.items()}
        for name, gradient in means.items():
            self._update(name, gradient, planned.t)
        return found

    def _counted(self) -> list[str]:
        """The parameters whose gradients are in the norm."""
        return [*self.values, *[EMBEDDING] * self.change.tied_twice]

    def _update(self, name: str, gradient: torch.Tensor, t: int) -> None:
        case, state = self.case, self.states[name]
        lr, decay = case.lr * case.factor(t), case.weight_decay
        with computed_in("fp32"):
            if case.optimizer == "adamw":
                made = adamw(self.masters[name], gradient, state, t + 1, lr, case.betas, case.adam_eps, decay)
            else:
                made = sgd(self.masters[name], gradient, state, t + 1, lr, case.momentum, decay)
        self.masters[name], self.states[name] = made
        low = case.dtype != "fp32"
        self.values[name] = rounded_to(case.dtype)(self.masters[name]) if low else self.masters[name]


def plan(case: TrainStepCase) -> tuple[Planned, ...]:
    """What every rank must decide in each step. Raises Undecided."""
    return _plan(case)


@functools.lru_cache(maxsize=64)
def _plan(case: TrainStepCase) -> tuple[Planned, ...]:
    return tuple(_planned(case))


def _planned(case: TrainStepCase) -> Iterator[Planned]:
    state, t = begin(case.scaling), 0
    model = Model.of(case, tensors(case.model)) if case.dtype == "fp16" else None
    for step in range(case.steps):
        scale = state.scale
        put = any(True for rank in range(case.mesh.size) for _ in case.hits(rank, step))
        found, skipped = Tensors(), put
        if model is not None and not put:
            with largest_of(case) as largest:
                found, _ = model.gradients(step, scale)
            overflow = overflows(case, largest)
            if overflow is None:
                raise Undecided(
                    f"step {step} of the case has gradients near {case.model.format.largest:g}, so that rounding "
                    "decides whether it overflows: expected a smaller scale, or a much larger one"
                )
            skipped = overflow
        state = after(case.scaling, state, skipped)
        planned = Planned(scale, skipped, state, t)
        if model is not None and not skipped:
            model.step(found, planned)
        yield planned
        t += not skipped


def overflows(case: TrainStepCase, largest: Largest) -> bool | None:
    """Whether a step does in fp16: where what every implementation stores is too large, and not where nothing is; None
    where rounding, or the order of a sum, decides. largest: of its gradients."""
    limit = case.model.format.largest
    if largest.stored > _MARGIN * limit:
        return True
    return False if largest.reached(case.model.tied) * _MARGIN < limit else None


def largest_of(case: TrainStepCase) -> Largest:
    """What is to look at the gradients of a step."""
    model = case.model
    ranks, group = model.replicas * model.data_parallel_size, model.micro_batches
    # Those of one size are computed together, and stand one after another.
    group, apart = (group, 1) if len(set(model.sizes)) == 1 else (1, group)
    return Largest(ranks * group, group, apart)


def expected(
    case: TrainStepCase,
    given: Tensors,
    plans: Sequence[Planned],
    change: Changed = _RIGHT,
    kept: Sequence[Masks] = (),
) -> dict[str, torch.Tensor | None]:
    """All values, float64. plans: as of `plan`, made before, as rounding does not decide them. change: a mistake that
    is made. kept: of each step, where the model has dropout, its masks."""
    out: dict[str, torch.Tensor | None] = {}
    model, before = Model.of(case, given, change, kept), Tensors()
    for step, planned in enumerate(plans):
        if change.anew and step == change.anew:
            model.begin()
        if planned.skipped:
            out[f"loss[{step}]"] = model.loss(step)
            continue
        gradients, out[f"loss[{step}]"] = model.gradients(step, planned.scale)
        if change.added:
            before = gradients = {name: x + before.get(name, 0.0) for name, x in gradients.items()}
        out |= {f"{name}[{step}]": value for name, value in model.step(gradients, planned).items()}
    for name in (*model.values, *((OUTPUT,) if case.model.tied else ())):
        source = name if name in model.values else EMBEDDING
        found = {name: model.values[source], f"{name}.master": model.masters[source]}
        found |= {f"{name}.{kind}": values for kind, values in model.states[source].items()}
        if case.dtype == "fp32":
            del found[f"{name}.master"]
        out |= {what: values.clone() for what, values in found.items()}
    return out
