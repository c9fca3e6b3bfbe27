"""Training of the GPT of `torch_gpt`, of torch's own parts: ``torch.optim`` and LambdaLR, ``clip_grad_norm_``,
``GradScaler``. Parameters are in fp32, and so their own masters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from harness.candidates.torch_gpt import GPT, Step, layouts, named, parallel_gpt
from harness.local import as_local
from harness.train_step import Trainer
from reference.train_step import TrainStepCase

TRAINER_FEATURES = (
    "train_step_adamw",
    "train_step_momentum",
    "train_step_weight_decay",
    "train_step_warmup",
    "train_step_clip_eps",
    "train_step_dynamic",
    "train_step_load",
)
_KIND = {"momentum": "momentum_buffer"}


class TorchTrainer:
    """A model, and what trains it."""

    def __init__(self, case: TrainStepCase, mesh: DeviceMesh) -> None:
        self.case, self.model = case, parallel_gpt(case.model, mesh)
        self.backward = Step(case.model, self.model, mesh)
        self.optimizer = optimizer_of(case, self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, case.factor)
        scaling = case.scaling
        self.scaler: Any = torch.amp.GradScaler(
            "cpu",
            init_scale=scaling.initial,
            growth_factor=scaling.growth_factor,
            backoff_factor=scaling.backoff_factor,
            growth_interval=scaling.growth_interval,
        )
        self.scaler.scale(torch.ones(1))  # which makes its tensors
        self.norm, self.made, self.skipped = 0.0, 0, False
        self.optimizer.register_step_post_hook(lambda *_: setattr(self, "made", self.made + 1))

    def step(self, ids: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.backward(ids, targets, valid, self.scaler.scale)
        self.scaler.unscale_(self.optimizer)
        if self.case.clip:
            self.norm = float(self.clip())
        made = self.made
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.case.scaling.kind == "constant":
            self.scaler.update(self.case.scaling.initial)
        self.skipped = self.made == made
        if not self.skipped:
            self.schedule.step()
        return loss

    def clip(self) -> torch.Tensor:
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def save(self) -> dict[str, Any]:
        """This rank's part: of a whole state, torch.distributed.checkpoint.state_dict cannot set what is cut unevenly,
        nor a state without tensors. Of DTensors what is local: others have the mesh of this process in them."""
        return {
            "model": _local(self.model.state_dict()),
            "optimizer": _local(self.optimizer.state_dict()),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "made": self.made,
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        for name, parameter in self.model.named_parameters():
            as_local(parameter).detach().copy_(saved["model"][name])
        parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        kept = {
            i: {kind: _as_of(parameters[i], one) for kind, one in state.items()}
            for i, state in saved["optimizer"]["state"].items()
        }
        self.optimizer.load_state_dict({**saved["optimizer"], "state": kept})
        self.schedule.load_state_dict(saved["schedule"])
        self.scaler.load_state_dict(saved["scaler"])
        self.made = saved["made"]


def _local(state: Any) -> Any:
    return tree_map(lambda one: as_local(one) if isinstance(one, DTensor) else one, state)


def _as_of(parameter: torch.Tensor, local: Any) -> Any:
    """A part of a state that is cut as the parameter is; what is no such part, as a count of steps is, as it is."""
    if not isinstance(parameter, DTensor) or not isinstance(local, torch.Tensor) or local.ndim != parameter.ndim:
        return local
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, shape=shape, stride=stride)


def optimizer_of(case: TrainStepCase, model: GPT) -> torch.optim.Optimizer:
    if case.optimizer == "adamw":
        return torch.optim.AdamW(
            model.parameters(), lr=case.lr, betas=case.betas, eps=case.adam_eps, weight_decay=case.weight_decay
        )
    return torch.optim.SGD(model.parameters(), lr=case.lr, momentum=case.momentum, weight_decay=case.weight_decay)


def trainer(case: TrainStepCase, made: TorchTrainer) -> Trainer:
    """As the harness wants it."""
    parameters = named(case.model, made.model)

    def state(name: str, kind: str) -> torch.Tensor:
        parameter = parameters[name]
        kept = made.optimizer.state.get(parameter, {}).get(_KIND.get(kind, kind))
        return as_local(torch.zeros_like(parameter) if kept is None else kept).detach().flatten()

    dynamic = case.scaling.kind == "dynamic"
    return Trainer(
        made.step,
        parameters,
        layouts(case.model, made.model),
        made.scaler.get_scale,
        lambda: made.skipped,
        counters=(lambda: {"good": made.scaler.state_dict()["_growth_tracker"]}) if dynamic else None,
        steps=lambda: made.made,
        norm=lambda: made.norm,
        state=state,
        save=made.save,
        load=made.load,
    )
