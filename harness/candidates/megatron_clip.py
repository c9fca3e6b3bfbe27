"""Megatron-Core's ``get_grad_norm_fp32`` and ``clip_grad_by_total_norm_fp32``, as ``megatron-core`` offers them.

They are called as its optimizers call them: with the gradients that count on this rank, over the model-parallel group,
or over all ranks where its distributed optimizer shards them. Gradients are of fp32.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from harness.candidates.megatron_core_on_cpu import MadeOnTheCpu
from harness.clip import Clipper
from reference.clip import ClipCase, has_empty_piece, held

if importlib.util.find_spec("megatron") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Transformer Engine and APEX, which CPU ranks do without
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
        from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
        from megatron.core.transformer.module import param_is_not_shared

CLIP_FEATURES = (
    "clip_eps",
    "clip_stages",
    "clip_tied",
    "clip_sharded",
    "clip_uneven",
    "clip_missing",
)


def clip_grad_norm(
    case: ClipCase,
    parameters: Mapping[str, torch.nn.Parameter],
    model_parallel: dist.ProcessGroup,
    known_fault: Callable[[str], None],
) -> Clipper:
    """The two functions, one after the other."""
    if case.norm_type != "2":
        if any(not _counted(case, rank) for rank in range(case.mesh.size)):
            known_fault("a norm other than the 2-norm on a rank without gradients that count: raises")
        if case.norm_type == "inf" and has_empty_piece(case):
            known_fault("the inf norm of an empty gradient: raises")
    if case.norm_type == "inf" and case.nonfinite == "nan":
        known_fault("the inf norm loses a NaN")
    for i, one in enumerate(case.parameters):
        parameter = parameters.get(f"parameter{i}")
        if parameter is not None:
            parameter.tensor_model_parallel = one.split  # type: ignore[attr-defined]
            parameter.shared = held(case, i, dist.get_rank()) != f"gradient{i}"  # type: ignore[attr-defined]
    sharded = any(one.sharded for one in case.parameters)
    group = dist.group.WORLD if sharded else model_parallel

    def clip() -> float:
        counted = [
            parameter.grad
            for parameter in parameters.values()
            if parameter.grad is not None
            and param_is_not_shared(parameter)
            and param_is_not_tensor_parallel_duplicate(parameter)
        ]
        with MadeOnTheCpu():
            norm = get_grad_norm_fp32(counted, case.asked_norm_type, grad_stats_parallel_group=group)
            clip_grad_by_total_norm_fp32(list(parameters.values()), case.asked_limit, norm)
        return float(norm)

    return Clipper(clip)


def _counted(case: ClipCase, rank: int) -> list[int]:
    """The parameters whose gradients count on a rank."""
    first = case.mesh.coordinate(rank, "tp") == 0
    return [
        i
        for i, one in enumerate(case.parameters)
        if held(case, i, rank) == f"gradient{i}" and not case.is_without(i, rank) and (one.split or first)
    ]
