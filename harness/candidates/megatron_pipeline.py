"""Megatron-Core's pipeline schedules, as the candidate ``megatron-core`` offers them.

One tensor of three dimensions crosses a border. The loss is normalised here, as its own way needs its
DistributedDataParallel; gradients stay in ``grad``.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.candidate import NotOffered
from harness.candidates.megatron_core_on_cpu import MadeOnTheCpu
from harness.pipeline import Pipeline
from harness.stages import StageModule
from reference.pipeline import PipelineCase

if importlib.util.find_spec("megatron") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Transformer Engine and APEX, which CPU ranks do without
        from megatron.core.enums import ModelType
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer import TransformerConfig

FEATURES = (
    "pipeline_any_axis",
    "pipeline_1f1b",
    "pipeline_interleaved",
    "pipeline_few",
    "pipeline_uneven",
    "pipeline_sizes",
    "pipeline_widths",
    "pipeline_frozen",
    "pipeline_plain",
    "pipeline_steps",
    "pipeline_accumulate",
    "pipeline_dropout",
    "pipeline_same_bits",
)


class _Model(nn.Module):
    """A stage as its schedules call it."""

    def __init__(self, stage: StageModule, config: Any) -> None:
        super().__init__()
        self.stage, self.config, self.model_type = stage, config, ModelType.encoder_or_decoder
        self._inputs: list[torch.Tensor | None] = [None]

    def set_input_tensor(self, inputs: list[torch.Tensor | None]) -> None:
        self._inputs = inputs

    def forward(self, x: torch.Tensor) -> Any:
        (received,) = self._inputs
        return self.stage(x if self.stage.number == 0 else received)


def pipeline(
    case: PipelineCase,
    stages: Sequence[StageModule],
    group: dist.ProcessGroup,
    alone: dist.ProcessGroup,
    strict: bool,
) -> Pipeline:
    """The stages in a schedule of Megatron-Core. alone: a group of this rank, for the axes that have no part in it.
    strict: with its default, batched messages, whose directions two ranks of an interleaved schedule mix up."""
    p, m = case.parallel_size, case.micro_batches
    if case.schedule == "interleaved" and p == 1:
        raise NotOffered("its interleaved schedule is for at least two ranks")
    config: Any = TransformerConfig(
        num_layers=case.stages,
        hidden_size=case.widths[0],
        num_attention_heads=1,
        kv_channels=1,
        pipeline_model_parallel_size=p,
        virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 else None,
        microbatch_group_size_per_vp_stage=p,
        pipeline_dtype=case.format.torch_dtype,
        variable_seq_lengths=len(set(case.sizes)) > 1 or len(set(case.widths)) > 1,
        overlap_p2p_comm=case.chunks > 1 and not strict,
        batch_p2p_comm=case.chunks == 1 or strict,
        calculate_per_token_loss=True,
        moe_token_dispatcher_type="alltoall",  # of no use here, but the default wants fixed lengths
        use_cpu_initialization=True,
    )
    models = [_Model(stage, config) for stage in stages]
    groups = ProcessGroupCollection()
    for name in ("tp", "cp", "embd", "pos_embd", "dp_cp"):
        setattr(groups, name, alone)
    groups.pp = group
    run = schedules.get_forward_backward_func(pp_size=p, vp_size=config.virtual_pipeline_model_parallel_size)
    last = any(stage.last for stage in stages)

    def step(inputs: Sequence[torch.Tensor], valid: torch.Tensor) -> torch.Tensor | None:
        divisor = valid.sum().clamp(min=1) if case.loss == "token_mean" else torch.ones((), dtype=torch.int64)

        def forward_step(batches: Iterator[Any], model: _Model) -> Any:
            x, mask = next(batches)

            def loss(token_losses: torch.Tensor) -> Any:
                share = torch.where(mask, token_losses, 0).sum() / divisor
                return share, mask.sum().to(torch.int), share.detach().clone()

            return model(x), loss

        sizes = list(case.sizes)
        batches = [
            iter(list(zip(torch.split(inputs[0], sizes), torch.split(valid, sizes), strict=True))) for _ in models
        ]
        with _cuda_is_the_cpu():
            found: list[torch.Tensor] = run(
                forward_step_func=forward_step,
                data_iterator=batches if len(models) > 1 else batches[0],
                model=models if len(models) > 1 else models[0],
                num_microbatches=m,
                seq_length=sizes[0],
                micro_batch_size=case.length,
                p2p_communicator=P2PCommunicator(pp_group=group, config=config),
                pg_collection=groups,
            )
        return torch.stack(found).sum() if last else None

    return Pipeline(step)


@contextmanager
def _cuda_is_the_cpu() -> Iterator[None]:
    """What its schedules ask of a GPU: a counter on it, and that it has done its work."""
    synchronize = torch.cuda.synchronize
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None
    try:
        with MadeOnTheCpu():
            yield
    finally:
        torch.cuda.synchronize = synchronize
