"""What PyTorch has for mixed precision, put together as its documentation does it: FSDP's ShardedGradScaler, which
agrees over a group, torch.optim on fp32 masters that the trainer keeps, LambdaLR, and clip_grads_with_norm_ with a norm
that is summed over the groups.

Not offered: masters that are cut (FSDP's are), hysteresis and a minimum of the scale, which GradScaler has not, ranks
without any parameter. It refuses neither dtypes nor states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grads_with_norm_

from harness.mixed_precision import MixedPrecision
from reference.mixed_precision import MixedPrecisionCase
from reference.mixed_precision_steps import limit

MIXED_PRECISION_FEATURES = (
    "mixed_precision_fp32",
    "mixed_precision_adamw",
    "mixed_precision_groups",
    "mixed_precision_warmup",
    "mixed_precision_fp32_beside",
    "mixed_precision_main_grad",
    "mixed_precision_clip_eps",
    "mixed_precision_split",
    "mixed_precision_uneven",
    "mixed_precision_stages",
    "mixed_precision_tied",
    "mixed_precision_frozen",
    "mixed_precision_dynamic",
    "mixed_precision_overflow",
    "mixed_precision_reload",
    "mixed_precision_load",
)
_KIND = {"momentum": "momentum_buffer"}


def mixed_precision(
    case: MixedPrecisionCase, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh
) -> MixedPrecision:
    return _Trainer(case, parameters, mesh).presented()


class _Trainer:
    def __init__(self, case: MixedPrecisionCase, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
        self.case, self.mesh = case, mesh
        self.model = {name: p for name, p in parameters.items() if p.requires_grad}
        self.masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in self.model.items()}
        self.optimizer = self._optimizer()
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, case.factor)
        scaling = case.scaling
        self.scaler = ShardedGradScaler(
            "cpu",
            init_scale=scaling.initial,
            growth_factor=scaling.growth_factor,
            backoff_factor=scaling.backoff_factor,
            growth_interval=scaling.growth_interval,
            process_group=dist.group.WORLD,
        )
        self.scaler.scale(torch.ones(1))  # which makes its tensors
        self.norm, self.made = 0.0, 0
        self.optimizer.register_step_post_hook(lambda *_: setattr(self, "made", self.made + 1))

    def _optimizer(self) -> torch.optim.Optimizer:
        case = self.case
        groups = [
            {
                "params": [p for name, p in self.masters.items() if case.group_of(_index(name)) == number],
                "lr": group.lr,
                "weight_decay": group.weight_decay,
            }
            for number, group in enumerate(case.asked_groups)
        ]
        if case.optimizer == "adamw":
            return torch.optim.AdamW(groups, betas=case.betas, eps=case.adam_eps)
        return torch.optim.SGD(groups, momentum=case.momentum)

    def step(self) -> bool:
        for name, master in self.masters.items():
            master.grad = self._reduced(self.model[name])
        made = self.made
        self.scaler.unscale_(self.optimizer)
        if self.case.clip:
            self.norm = self._norm()
            clip_grads_with_norm_(self.masters.values(), limit(self.case), torch.tensor(self.norm))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.case.scaling.kind == "constant":
            self.scaler.update(self.case.scaling.initial)
        skipped = self.made == made
        if not skipped:
            self.schedule.step()
            with torch.no_grad():
                for name, master in self.masters.items():
                    self.model[name].copy_(master)
        return skipped

    def _reduced(self, p: nn.Parameter) -> torch.Tensor:
        """Over the data-parallel ranks, in fp32; zeros where there is no gradient."""
        own = getattr(p, "main_grad", None)
        own = p.grad if own is None else own
        found = torch.zeros(p.shape) if own is None else own.detach().to(torch.float32, copy=True)
        if self.case.replicas > 1:
            found /= self.case.replicas
            dist.all_reduce(found, group=self.mesh.get_group("dp"))
        return found

    def _norm(self) -> float:
        """Of what counts on this rank, summed over the axes that cut parameters."""
        case, first = self.case, {axis: self.mesh.get_local_rank(axis) == 0 for axis in self.case.mesh.names}
        stage = self.mesh.get_local_rank("pp") if "pp" in case.mesh.names else 0
        total = torch.zeros((), dtype=torch.float32)
        for name, master in self.masters.items():
            i = _index(name)
            if stage == case.stages(i)[0] and (case.parameters[i].split or first.get("tp", True)):
                assert master.grad is not None
                total += torch.linalg.vector_norm(master.grad) ** 2
        for axis in ("tp", "pp"):
            if axis in case.mesh.names:
                dist.all_reduce(total, group=self.mesh.get_group(axis))
        return float(total.sqrt())

    @torch.no_grad()
    def reload(self) -> None:
        for name, master in self.masters.items():
            master.copy_(self.model[name])

    def state(self, name: str, kind: str) -> torch.Tensor:
        kept = self.optimizer.state.get(self.masters[name], {}).get(_KIND.get(kind, kind))
        return torch.zeros_like(self.masters[name]) if kept is None else kept

    def save(self) -> dict[str, Any]:
        return {
            "masters": {name: p.detach() for name, p in self.masters.items()},
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "made": self.made,
        }

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any]) -> None:
        for name, master in self.masters.items():
            master.copy_(saved["masters"][name])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])
        self.scaler.load_state_dict(saved["scaler"])
        self.made = saved["made"]

    def presented(self) -> MixedPrecision:
        dynamic = self.case.scaling.kind == "dynamic"
        return MixedPrecision(
            self.step,
            self.scaler.get_scale,
            counters=(lambda: {"good": self.scaler.state_dict()["_growth_tracker"]}) if dynamic else None,
            steps=lambda: self.made,
            norm=lambda: self.norm,
            master=lambda name: self.masters[name].detach(),
            state=self.state,
            reload=self.reload,
            save=self.save,
            load=self.load,
        )


def _index(name: str) -> int:
    return int(name.removeprefix("parameter"))
