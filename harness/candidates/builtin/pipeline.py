"""The engine that carries out pipeline schedules."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.pipeline import Pipeline
from harness.stages import StageModule
from reference.pipeline import PipelineCase
from sharded.pipeline import Pipeline as Engine
from sharded.pipeline_agreement import Declared
from sharded.pipeline_batch import TokenLoss
from sharded.pipeline_schedules import ScheduleKind
from sharded.process_groups import ProcessGroups
from sharded.sharded_optimizer import ShardedOptimizer
from sharded.updates import SGD

_SCHEDULES: dict[str, ScheduleKind] = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "interleaved"}


def pipeline(case: PipelineCase, stages: Sequence[StageModule], groups: ProcessGroups) -> Pipeline:
    # Shapes of a border are declared here, and otherwise in the messages, so that both ways are used.
    declares = case.invalid in ("shape", "dtype") or case.ids
    engine = Engine(
        stages,
        groups.group(case.axis),
        TokenLoss(case.loss),
        schedule=_SCHEDULES[case.schedule],
        recompute=case.recompute,
        tied={"tied": [(stage.number, stage.tied) for stage in stages if stage.tied is not None]},
        borders=[Declared(stage.takes, stage.gives) for stage in stages] if declares else None,
    )
    named = [(f"{stage.number}.{name}", p) for stage in stages for name, p in stage.named().items()]
    if case.update == "sharded" and any(p.requires_grad for _, p in named):
        optimizer = ShardedOptimizer(named, groups.group(*case.replica_axes), SGD(lr=1.0), reduction="sum")
        engine.reduce = optimizer.step  # made after the engine has agreed with all ranks of the pipeline

    def step(inputs: Sequence[torch.Tensor], valid: torch.Tensor) -> torch.Tensor | None:
        sizes = list(case.sizes)
        micro_batches = list(zip(*(torch.split(x, sizes) for x in inputs), strict=True))
        return engine.step(micro_batches, torch.split(valid, sizes) if sizes else [], len(sizes))

    return Pipeline(step)
