"""Megatron-Core's Float16OptimizerWithFloat16Params on CPU, with its grad scalers, as the candidate ``megatron-core``
offers it. The gradients it wants are reduced already: that is done here as its DistributedDataParallel does, in fp32.

Not offered: models in fp32 (their optimizer has no scaler), a schedule (its own begins elsewhere), an optimizer that is
sharded (DistributedOptimizer moves what it keeps to a GPU), the limit divided by the norm alone. It does not look at
what a state is of.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.candidates.megatron_core_on_cpu import MadeOnTheCpu
from harness.candidates.megatron_loss_scale import scaler_of
from harness.mixed_precision import MixedPrecision
from reference.mixed_precision import MixedPrecisionCase
from reference.mixed_precision_steps import limit

if importlib.util.find_spec("megatron") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Transformer Engine and APEX, as in megatron_core.py
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
        from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

MIXED_PRECISION_FEATURES = (
    "mixed_precision_adamw",
    "mixed_precision_groups",
    "mixed_precision_fp32_beside",
    "mixed_precision_main_grad",
    "mixed_precision_clip_eps",
    "mixed_precision_split",
    "mixed_precision_uneven",
    "mixed_precision_stages",
    "mixed_precision_tied",
    "mixed_precision_frozen",
    "mixed_precision_dynamic",
    "mixed_precision_hysteresis",
    "mixed_precision_overflow",
    "mixed_precision_reload",
    "mixed_precision_load",
    "mixed_precision_refuses",
)
_KIND = {"momentum": "momentum_buffer"}


def mixed_precision(
    case: MixedPrecisionCase, parameters: Mapping[str, nn.Parameter], data: dist.ProcessGroup, stage: int
) -> MixedPrecision:
    """data: the data-parallel group. stage: this rank's."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    for name, parameter in trained.items():
        i = int(name.removeprefix("parameter"))
        set_tensor_model_parallel_attributes(parameter, case.parameters[i].split, 0, 1)
        parameter.shared = stage != case.stages(i)[0]  # type: ignore[attr-defined]
    config = OptimizerConfig(
        fp16=case.dtype == "fp16",
        bf16=case.dtype == "bf16",
        params_dtype=case.format.torch_dtype,
        clip_grad=limit(case) if case.clip else 0.0,
    )
    with MadeOnTheCpu():
        made: Any = Float16OptimizerWithFloat16Params(
            _inner(case, trained), config, scaler_of(case.scaling), lambda *_: None
        )
    norms: list[float] = []

    def step() -> bool:
        for parameter in trained.values():
            parameter.main_grad = _reduced(parameter, data)  # type: ignore[attr-defined]
        with MadeOnTheCpu():
            successful, norm, _ = made.step()
        norms[:] = [norm]
        return not successful

    def main(name: str) -> torch.Tensor:
        found: torch.Tensor = getattr(trained[name], "main_param", trained[name]).detach()
        return found

    def state(name: str, kind: str) -> torch.Tensor:
        kept = made.optimizer.state.get(getattr(trained[name], "main_param", trained[name]), {})
        found: torch.Tensor | None = kept.get(_KIND.get(kind, kind))
        return torch.zeros_like(main(name)) if found is None else found

    def load(saved: Any) -> None:
        with MadeOnTheCpu():
            made.load_state_dict(saved)

    def reload() -> None:
        with MadeOnTheCpu():
            made.reload_model_params()

    def counters() -> Mapping[str, int]:
        kept = made.grad_scaler.state_dict()
        return {"good": kept["growth_tracker"], "left": max(0, kept["hysteresis_tracker"])}

    return MixedPrecision(
        step,
        made.get_loss_scale,
        counters=counters if case.scaling.kind == "dynamic" else None,
        norm=lambda: norms[0],
        master=main,
        state=state,
        reload=reload,
        save=made.state_dict,
        load=load,
    )


def _inner(case: MixedPrecisionCase, trained: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {
            "params": [
                p for name, p in trained.items() if case.group_of(int(name.removeprefix("parameter"))) == number
            ],
            "lr": group.lr,
            "weight_decay": group.weight_decay,
            # By these it knows a group again.
            "lr_mult": float(number),
            "wd_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
        }
        for number, group in enumerate(case.asked_groups)
    ]
    if case.optimizer == "adamw":
        return torch.optim.AdamW(groups, betas=case.betas, eps=case.adam_eps)
    return torch.optim.SGD(groups, momentum=case.momentum)


def _reduced(p: nn.Parameter, data: dist.ProcessGroup) -> torch.Tensor:
    """Zeros where there is no gradient, as in its buffers."""
    own = p.grad if p.grad is not None else getattr(p, "main_grad", None)
    found = torch.zeros(p.shape) if own is None else own.detach().to(torch.float32, copy=True)
    if data.size() > 1:
        found /= data.size()
        dist.all_reduce(found, group=data)
    return found
