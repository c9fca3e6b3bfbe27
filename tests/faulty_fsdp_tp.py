"""The candidate torch-fsdp-tp with the mistakes of a trainer that puts torch's parts together wrongly. The seed of a
case's ids says which is made, so that one set of ranks serves all."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.distributed.fsdp import FSDPModule

from harness.candidates.torch_fsdp_tp import TorchFsdpTp
from harness.candidates.torch_gpt import GPT, Step, layouts, named, parallel_gpt
from harness.candidates.torch_trainer import TorchTrainer, trainer
from harness.gpt import Gpt
from harness.local import as_local
from harness.train_step import Trainer
from reference.gpt import GptCase
from reference.train_step import TrainStepCase

#: From this seed of ids on, the mistakes in turn; below it none.
FIRST = 50
MISTAKES = ("averaged", "own tokens", "first micro-batch", "own norm", "same positions")
#: And what is right as well, only slower.
SYNCS_EVERY = FIRST + len(MISTAKES)


def seed_of(mistake: str) -> int:
    return FIRST + MISTAKES.index(mistake)


class FaultyFsdpTp(TorchFsdpTp):
    name: ClassVar[str] = "torch-fsdp-tp, faulty"

    def gpt(self, case: GptCase) -> Gpt:
        self._refuse(case)
        model = parallel_gpt(case, self.device_mesh)
        step = Step(case, model, self.device_mesh)
        spoil(case, model, step)
        return Gpt(step, named(case, model), layouts(case, model))

    def train_step(self, case: TrainStepCase) -> Trainer:
        made = TorchTrainer(case, self.device_mesh)
        if case.model.ids.seed == seed_of("own norm"):
            made.clip = lambda: clipped_by_its_own(made)  # type: ignore[method-assign]
        spoil(case.model, made.model, made.backward)
        return trainer(case, made)


def spoil(case: GptCase, model: GPT, step: Step) -> None:
    mistake, one = case.ids.seed, model
    assert isinstance(one, FSDPModule)
    sync = one.set_requires_gradient_sync
    if mistake == seed_of("averaged"):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(case.data_parallel_size))
    elif mistake == seed_of("own tokens"):
        step.count = lambda valid: valid.sum()  # type: ignore[method-assign]
    elif mistake == seed_of("first micro-batch"):
        one.set_requires_gradient_sync = lambda last: sync(not last)  # type: ignore[method-assign, assignment]
    elif mistake == seed_of("same positions") and case.sequence_parallel:
        model.own = slice(0, case.length // case.mesh.axis_size("tp"))
    elif mistake == SYNCS_EVERY:
        one.set_requires_gradient_sync = lambda last: sync(True)  # type: ignore[method-assign, assignment]


def clipped_by_its_own(made: TorchTrainer) -> torch.Tensor:
    """By the norm of the parts that this rank has."""
    parameters: Any = list(made.model.parameters())
    norm = torch.nn.utils.get_total_norm([as_local(p.grad) for p in parameters])
    torch.nn.utils.clip_grads_with_norm_([as_local_gradient(p) for p in parameters], made.case.clip, norm)
    return norm


def as_local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor whose gradient is that of this rank's part, the same memory."""
    assert parameter.grad is not None
    made = as_local(parameter.detach()).requires_grad_()
    made.grad = as_local(parameter.grad)
    return made
