"""Training steps of a GPT over tensor-, pipeline- and data-parallel ranks: the case as data.

Each step is one of `reference.gpt` with a batch of its own, its loss multiplied by a scale, and then one of an
optimizer as in `reference.mixed_precision`. What one process computes is in `reference.train_step_expected`.

    loss[step]                           [1], of the whole batch, before the step
    norm[step], coefficient[step]        [1], of steps that are not skipped, where gradients are clipped
    a parameter                          at the end, as `reference.gpt_parameters.shapes` says
    {parameter}.master                   likewise, where the dtype is not fp32
    {parameter}.{state}                  likewise, `TrainStepCase.states`
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from reference.gpt import GptCase
from reference.gpt_parameters import owner_of, shapes
from reference.loss_scale import Scaling, Value
from reference.mesh import Mesh
from reference.mixed_precision import DTYPES, UNSCALED, Optimizer
from reference.mixed_precision_parts import Overflow

#: How data-parallel ranks go on after a state is loaded: as before; each alone on the whole batch (``apart``); or with
#: the others, after each was alone (``together``).
Resume = Literal["same", "apart", "together"]

#: The axis in place of dp while its ranks train alone: of replicas.
_ALONE = "cp"


@dataclass(frozen=True)
class TrainStepCase:
    """Steps of AdamW, or of SGD with ``momentum``, as torch.optim's.

    model: the GPT and the first step's batch; later ones have other tokens, and other counts of valid ones. lr: in the
    t-th step that is not skipped, from 0, multiplied by (t + 1) / warmup below it; warmup 0 for a constant one. clip:
    the limit of the global 2-norm, 0 for none; clip_eps is added to the norm before the limit is divided by it.
    sharded: masters and state are cut over the dp ranks. scaling: of the loss. overflows: what gradients have on some
    ranks, beside what overflows by a large scale in fp16; parameters are counted in the order of the model. load:
    before this step the whole state is saved, and a new trainer loads it; 0 for never. resume: who goes on. relaunch:
    they are new processes, which have nothing but the state. Ranks along other axes than tp, pp and dp are replicas,
    and train alike.
    """

    model: GptCase
    steps: int = 1
    optimizer: Optimizer = "sgd"
    lr: float = 0.125
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 0.125
    weight_decay: float = 0.0
    warmup: int = 0
    clip: float = 0.0
    clip_eps: float = 0.0
    sharded: bool = False
    scaling: Scaling = UNSCALED
    overflows: tuple[Overflow, ...] = ()
    load: int = 0
    resume: Resume = "same"
    relaunch: bool = False

    def __post_init__(self) -> None:
        model = self.model
        if model.dropout and (model.dtype == "fp16" or self.resume != "same"):
            raise ValueError(
                f"dropout {model.dropout} in {model.dtype} with resume {self.resume!r}: expected none in fp16, where "
                "masks would decide what overflows, and none where other ranks go on"
            )
        if model.dtype not in DTYPES or model.update != "none":
            raise ValueError(
                f"a model in {model.dtype} with update {model.update!r}: expected one of {', '.join(DTYPES)}, and the "
                "update none"
            )
        for name, kind in (("optimizer", Optimizer), ("resume", Resume)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected one of {', '.join(get_args(kind))}")
        if not 0 < self.lr < math.inf or min(self.weight_decay, self.warmup, self.clip, self.clip_eps) < 0:
            raise ValueError("expected a learning rate above 0, and weight_decay, warmup, clip and clip_eps from 0")
        if self.adam_eps <= 0 or not all(0 <= x < 1 for x in (*self.betas, self.momentum)):
            raise ValueError(
                f"adam_eps is {self.adam_eps}, betas {self.betas} and momentum {self.momentum}: expected one above 0, "
                "and from 0 to below 1"
            )
        if self.steps < 1 or not 0 <= self.load < self.steps + (self.load == 0):
            raise ValueError(f"load {self.load} of {self.steps} steps: expected 0, or less than the steps, from 1")
        if self.relaunch and not self.load:
            raise ValueError("relaunch without a load: expected the step before which the state is loaded")
        if self.resume != "same" and (not self.load or "dp" not in model.mesh.names or model.replica_axes):
            raise ValueError(
                f"resume {self.resume!r} with load {self.load} on {model.mesh}: expected a load, and no axes but tp, "
                "pp and dp, and dp among them"
            )
        self._refuse_scales_and_overflows()

    def _refuse_scales_and_overflows(self) -> None:
        scaling = self.scaling
        scaling.require_valid()
        lowest = scaling.initial * (scaling.backoff_factor**self.steps if scaling.kind == "dynamic" else 1)
        factors = (scaling.growth_factor, scaling.backoff_factor, scaling.initial)
        if max(lowest, scaling.minimum) < 1 or any(math.frexp(x)[0] != 0.5 for x in factors):
            raise ValueError(f"{scaling}: expected powers of two, and no scale below 1 after {self.steps} steps")
        for one in self.overflows:
            if set(one.axes) - set(self.mesh.names) or one.step >= self.steps:
                raise ValueError(f"{one}: expected axes of the mesh {self.mesh}, and one of {self.steps} steps")

    @property
    def mesh(self) -> Mesh:
        return self.model.mesh

    @property
    def dtype(self) -> str:
        return self.model.dtype

    @property
    def ranks_of_data(self) -> int:
        """D"""
        return self.model.data_parallel_size

    @property
    def states(self) -> tuple[str, ...]:
        """The state tensors that are kept for each element."""
        if self.optimizer == "adamw":
            return "exp_avg", "exp_avg_sq"
        return ("momentum",) if self.momentum else ()

    @property
    def kept(self) -> tuple[str, ...]:
        """All that is kept beside a parameter."""
        return (*(("master",) if self.dtype != "fp32" else ()), *self.states)

    def factor(self, t: int) -> float:
        """By which the learning rate is multiplied in a step; t: of how many before it none was skipped."""
        return min(1.0, (t + 1) / self.warmup) if self.warmup else 1.0

    def batch(self, step: int) -> GptCase:
        """The model with the tokens of a step."""
        model = self.model
        if not step:
            return model
        turn = step % len(model.counts)
        ids = replace(model.ids, seed=model.ids.seed + 1000 * step)
        return replace(model, ids=ids, counts=(*model.counts[turn:], *model.counts[:turn]))

    def is_alone(self, step: int) -> bool:
        """Whether each rank along dp makes this step by itself, on the whole batch."""
        return self.resume == ("apart" if step >= self.load else "together")

    def seen_by(self, step: int) -> TrainStepCase:
        """The case as a trainer is asked for it in a step: where ranks along dp are alone, they are replicas, and each
        has the micro-batches of all."""
        if not self.is_alone(step):
            return self
        model, D = self.model, self.ranks_of_data
        mesh = Mesh(tuple((_ALONE if name == "dp" else name, size) for name, size in model.mesh.axes))
        alone = replace(model, mesh=mesh, sizes=model.sizes * D)
        return replace(self, model=alone, overflows=(), load=0, resume="same", relaunch=False)

    def hits(self, rank: int, step: int) -> Iterator[tuple[str, int, Value]]:
        """Parameter, element and value of each overflow that is put into this rank's own gradients; the element is to
        be taken modulo the rank's elements of the parameter. A rank without parameters is spared."""
        due = [one for one in self.overflows if one.step == step]
        stage = self.mesh.coordinate(rank, "pp")
        held = [name for name in shapes(self.model) if owner_of(self.model, name) == stage] if due else []
        for one in due:
            # Ranks that are alone are one process each: they must go the same way.
            axes = tuple(name for name in one.axes if name != "dp" or not self.is_alone(step))
            event = replace(one, axes=axes).event
            if held and event.hits(self.mesh, rank):
                yield held[one.parameter % len(held)], one.element, one.value
