"""The implementation that ships with the project, whole or with one planted fault (``builtin+F04``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, get_args

import torch
import torch.distributed as dist

import strategies.all_reduce
import strategies.clip
import strategies.collectives
import strategies.cross_entropy
import strategies.data_parallel
import strategies.embedding
import strategies.gpt
import strategies.linear
import strategies.loss_scale
import strategies.mixed_precision
import strategies.pipeline
import strategies.schedule
import strategies.sharded_optimizer
import strategies.train_step
import strategies.transformer
from harness.candidate import Candidate, NotOffered
from harness.candidates.builtin import (
    clip,
    data_parallel,
    gpt,
    layers,
    loss_scale,
    mixed_precision,
    pipeline,
    reductions,
    sharded_optimizer,
    train_step,
    transformer,
)
from harness.clip import Clipper
from harness.data_parallel import DataParallel
from harness.gpt import Gpt
from harness.loss_scale import LossScaler
from harness.mixed_precision import MixedPrecision
from harness.module import Sharded
from harness.pipeline import Pipeline
from harness.schedule import PipelineSchedule
from harness.sharded_optimizer import ShardedOptimizer
from harness.stages import StageModule
from harness.train_step import Trainer
from reference.all_reduce import AllReduceCase
from reference.clip import ClipCase
from reference.collectives import CollectivesCase
from reference.cross_entropy import CrossEntropyCase
from reference.data_parallel import DataParallelCase
from reference.embedding import EmbeddingCase
from reference.gpt import GptCase
from reference.linear import LinearCase
from reference.loss_scale import LossScaleCase
from reference.mesh import Mesh
from reference.mixed_precision import MixedPrecisionCase
from reference.pipeline import PipelineCase
from reference.schedule import ScheduleCase
from reference.sharded_optimizer import ShardedOptimizerCase
from reference.traffic import Transfer
from reference.train_step import TrainStepCase
from reference.transformer import TransformerCase
from sharded import mesh as sharded_mesh
from sharded import pipeline_schedules
from sharded.process_groups import ProcessGroups, set_default

#: Features of libraries only.
_NOT_OURS = (
    "all_reduce_library",
    "schedule_interleaved_zero_bubble",
    "schedule_zbv",
    "schedule_dualpipev",
    "pipeline_interleaved_zero_bubble",
    "pipeline_zbv",
)


def mutants() -> Iterable[Any]:
    """The planted faults: id, subject, fault, thread."""
    from sharded.mutants import all_mutants

    return all_mutants()


class Builtin(Candidate):
    """sharded/, on any mesh and in every option of the contract."""

    name: ClassVar[str] = "shardproof's own"
    requires: ClassVar[tuple[str, ...]] = ("shardproof",)
    supports = tuple(
        feature
        for subject in (
            strategies.linear,
            strategies.collectives,
            strategies.all_reduce,
            strategies.embedding,
            strategies.cross_entropy,
            strategies.transformer,
            strategies.data_parallel,
            strategies.sharded_optimizer,
            strategies.pipeline,
            strategies.gpt,
            strategies.loss_scale,
            strategies.clip,
            strategies.mixed_precision,
            strategies.train_step,
            strategies.schedule,
        )
        for feature in subject.FEATURES
        if feature not in _NOT_OURS
    )
    initialization = "full"

    def __init__(self, variant: str | None = None) -> None:
        if variant is not None:
            from sharded.mutants import UnknownMutant, apply

            try:
                apply(variant)
            except UnknownMutant as error:
                raise NotOffered(str(error)) from error

    def open(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.groups = ProcessGroups(mesh.axes, combined=())
        self.all_groups: ProcessGroups | None = None

    def activate(self) -> None:
        set_default(self.groups)

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        if self.all_groups is None:  # layers need only those along one axis
            self.all_groups = ProcessGroups(self.mesh.axes)
        if axes == ("embedding",):
            return self.all_groups.group_of_embedding()
        if axes == ("position-embedding",):
            return self.all_groups.group_of_position_embedding()
        return self.all_groups.group(*axes)

    def group_ranks(self, mesh: Mesh, axes: tuple[str, ...]) -> torch.Tensor:
        if axes == ("embedding",):
            return sharded_mesh.embedding_ranks(mesh.axes)
        if axes == ("position-embedding",):
            return sharded_mesh.position_embedding_ranks(mesh.axes)
        return sharded_mesh.group_ranks(mesh.axes, axes)

    def traffic(self, case: Any, needed: Sequence[Transfer]) -> Sequence[Transfer]:
        if isinstance(case, DataParallelCase):
            return data_parallel.in_buckets(case, needed)
        return reductions.with_agreement(case, needed) if isinstance(case, AllReduceCase) else needed

    def collective(self, case: CollectivesCase) -> Sharded:
        return reductions.collective(case, self.groups)

    def all_reduce(self, case: AllReduceCase) -> Sharded:
        return reductions.all_reduce(case, self.groups)

    def column_linear(self, case: LinearCase) -> Sharded:
        return layers.column_linear(case, self.groups)

    def row_linear(self, case: LinearCase) -> Sharded:
        return layers.row_linear(case, self.groups)

    def embedding(self, case: EmbeddingCase) -> Sharded:
        return layers.embedding(case, self.groups)

    def cross_entropy(self, case: CrossEntropyCase) -> Sharded:
        return layers.cross_entropy(case, self.groups)

    def transformer_layer(self, case: TransformerCase) -> Sharded:
        return transformer.transformer_layer(case, self.groups)

    def dropout_masks(self, case: TransformerCase) -> dict[str, torch.Tensor]:
        return transformer.dropout_masks(case, self.groups)

    def data_parallel(self, case: DataParallelCase, module: torch.nn.Module) -> DataParallel:
        return data_parallel.data_parallel(case, module, self.groups)

    def sharded_optimizer(
        self, case: ShardedOptimizerCase, parameters: Mapping[str, torch.nn.Parameter]
    ) -> ShardedOptimizer:
        return sharded_optimizer.sharded_optimizer(case, parameters, self.groups)

    def pipeline(self, case: PipelineCase, stages: Sequence[StageModule]) -> Pipeline:
        return pipeline.pipeline(case, stages, self.groups)

    def gpt(self, case: GptCase) -> Gpt:
        return gpt.gpt(case, self.groups)

    def loss_scaler(self, case: LossScaleCase) -> LossScaler:
        return loss_scale.loss_scaler(case, self.groups)

    def clip_gradients(self, case: ClipCase, parameters: Mapping[str, torch.nn.Parameter]) -> Clipper:
        return clip.clip_gradients(case, parameters, self.groups)

    def mixed_precision(self, case: MixedPrecisionCase, parameters: Mapping[str, torch.nn.Parameter]) -> MixedPrecision:
        return mixed_precision.mixed_precision(case, parameters, self.groups)

    def train_step(self, case: TrainStepCase) -> Trainer:
        return train_step.train_step(case, self.groups)

    def schedule(self, case: ScheduleCase) -> PipelineSchedule | None:
        kind: Any = case.kind
        if kind not in get_args(pipeline_schedules.ScheduleKind):
            return None
        made: Any = pipeline_schedules.schedule(kind, case.stages, case.chunks, case.micro_batches)
        return PipelineSchedule(made)
