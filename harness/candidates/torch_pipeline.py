"""PyTorch's torch.distributed.pipelining, as the candidate ``torch`` offers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining

from harness.candidate import NotOffered
from harness.pipeline import Pipeline
from harness.stages import StageModule
from reference.pipeline import PipelineCase
from reference.pipeline_stages import blocks_of

#: What its schedules do on gloo. A border's shapes are those of the first micro-batch.
PIPELINE_FEATURES = (
    "pipeline_any_axis",
    "pipeline_gpipe",
    "pipeline_gpipe_chunks",
    "pipeline_1f1b",
    "pipeline_interleaved",
    "pipeline_interleaved_any",
    "pipeline_interleaved_zero_bubble",
    "pipeline_zbv",
    "pipeline_few",
    "pipeline_widths",
    "pipeline_skip",
    "pipeline_skip_unused",
    "pipeline_ids",
    "pipeline_frozen",
    "pipeline_plain",
    "pipeline_steps",
    "pipeline_accumulate",
    "pipeline_dropout",
    "pipeline_same_bits",
)

#: Their backward has two parts, for the stage's inputs and for its weights.
_IN_PARTS = ("interleaved_zero_bubble", "zbv")
_SINGLE: dict[str, Any] = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
_MULTI: dict[str, Any] = {
    "gpipe": pipelining.ScheduleLoopedBFS,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


def pipeline(
    case: PipelineCase,
    stages: Sequence[StageModule],
    group: dist.ProcessGroup,
    strict: bool,
    known_fault: Callable[[str], None],
) -> Pipeline:
    """The stages in a schedule of torch. strict: it finds out all shapes by itself. known_fault: refuses a case that
    meets one."""
    if case.schedule in _IN_PARTS and case.parallel_size > 1 and case.skip in ("every", "last"):
        known_fault("zero bubble: a gradient in memory with gaps is sent as it is, and refused by gloo")
    if case.schedule in _IN_PARTS and any(_ends_in_a_view(case, number) for number in range(1, case.stages - 1)):
        known_fault("zero bubble: a stage that ends in a linear layer with a bias raises in backward")
    m, divisor = case.micro_batches, [torch.ones((), dtype=torch.int64)]
    # To find out the shapes it runs every stage once, and draws random numbers; and it receives a gradient into memory
    # with the strides that the gradient had then, which gloo refuses where these leave gaps.
    told = case.drops or (case.skip in ("every", "last") and not strict)
    made: list[Any] = [_stage(case, stage, group, told) for stage in stages]

    def loss(token_losses: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        # The mean over the tokens of the batch cannot be made of means: its own scaling of gradients is off.
        return torch.where(valid, token_losses, 0).sum() / divisor[0]

    if case.schedule in _SINGLE and case.chunks == 1:
        if m < case.parallel_size:
            raise NotOffered(f"{case.schedule} needs as many micro-batches as ranks, or more")
        schedule = _SINGLE[case.schedule](made[0], m, loss_fn=loss, scale_grads=False)
    else:
        if case.schedule.startswith("interleaved") and m % max(1, m // case.parallel_size):
            raise NotOffered("its interleaved schedules need rounds of equally many micro-batches")
        schedule = _MULTI[case.schedule](made, m, loss_fn=loss, scale_grads=False)
    first, last = stages[0].number == 0, any(stage.last for stage in stages)

    def step(inputs: Sequence[torch.Tensor], valid: torch.Tensor) -> torch.Tensor | None:
        divisor[0] = valid.sum().clamp(min=1) if case.loss == "token_mean" else torch.ones((), dtype=torch.int64)
        losses: list[torch.Tensor] = []
        schedule.step(*(inputs if first else ()), target=valid if last else None, losses=losses)
        return torch.stack(losses).sum() if last else None

    return Pipeline(step)


def _stage(case: PipelineCase, stage: StageModule, group: dist.ProcessGroup, told: bool) -> Any:
    static: dict[str, Any] = {}
    if told:
        static = {"input_args": _examples(case, stage, False), "output_args": _examples(case, stage, True)}
    return pipelining.PipelineStage(stage, stage.number, case.stages, torch.device("cpu"), group=group, **static)


def _ends_in_a_view(case: PipelineCase, number: int) -> bool:
    """Whether the last thing that a stage computes is a linear layer with a bias: of three dimensions, it is a view of
    the product of two."""
    computed = [b for b in blocks_of(case, number) if b.kind != "plain" or b.activation != "none"]
    return bool(computed) and computed[-1].bias and computed[-1].activation == "none"


def _examples(case: PipelineCase, stage: StageModule, leaving: bool) -> tuple[torch.Tensor, ...]:
    """Tensors as they enter or leave."""
    samples, dtype = case.sizes[0], case.format.torch_dtype
    forms: list[tuple[tuple[int | None, ...], torch.dtype]] = list(stage.gives if leaving else stage.takes)
    inner = True
    if leaving and stage.last:
        forms = [((None, case.length), case.loss_format.torch_dtype)]
    if not leaving and stage.number == 0:
        inner, forms = False, [((None, case.length, stage.entering), dtype)]
        forms += [((None, case.length), torch.int64)] if case.ids else []
    return tuple(
        torch.empty([samples if n is None else n for n in shape], dtype=kind).requires_grad_(
            inner and kind.is_floating_point
        )
        for shape, kind in forms
    )
