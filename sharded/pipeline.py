"""Pipeline parallelism: stages of a model on different ranks, and micro-batches that go through them.

The schedule is a list of actions a rank (`sharded.pipeline_schedules`); this is what carries it out. Gradients
accumulate in ``parameter.grad``, in the order of the micro-batches. (GPipe: arXiv 1811.06965; 1F1B and virtual stages:
arXiv 2104.04473.)
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from sharded.data_parallel import require_member
from sharded.pipeline_actions import Action
from sharded.pipeline_agreement import Declared, agreed_step, require_borders, require_chunks
from sharded.pipeline_batch import Loss
from sharded.pipeline_border import Border, Label
from sharded.pipeline_record import Record
from sharded.pipeline_schedules import ScheduleKind, schedule
from sharded.pipeline_stage import Stage
from sharded.pipeline_tied import Copies, TiedParameters
from sharded.random import RandomTracker

Tensors = Sequence[torch.Tensor]


class StageFailed(RuntimeError):
    """A stage raised. The message names stage, micro-batch and rank, and has the traceback; alike on every rank."""


class Pipeline:
    """The stages of this rank of a pipeline group of p ranks: chunk c of rank r is stage c * p + r.

    Stages are called with the tensors that the stage before returned, one or several: tensors of any dtype, of which
    those that require a gradient get one. The first stage is called with the inputs of a micro-batch; the output of the
    last goes to ``loss``.

    stages: the modules of this rank's chunks, as many on every rank. schedule: see `sharded.pipeline_schedules`.
    recompute: stages keep their inputs alone and compute again before backward. trackers: random streams, beside the
    default generator, that are put back for that. tied: the copies, on this rank, of parameters that several stages
    hold. reduce: called in `step` when the gradients of this pipeline are complete, those of tied parameters summed:
    the place for reductions over data-parallel ranks. before_forward: called with stage and micro-batch before each
    forward, and not where that is computed again. borders: what each stage takes and gives, so that borders that
    do not fit are refused here; without it they show in the first forward. measure: count stored bytes in ``record``.

    Raises ValueError, on every rank of the group, where ranks have different numbers of stages, stages disagree about
    the border between them, or copies of a tied parameter differ; and on a rank outside of the group.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        group: ProcessGroup,
        loss: Loss,
        *,
        schedule: ScheduleKind = "1f1b",
        recompute: bool = False,
        trackers: Sequence[RandomTracker] = (),
        tied: Copies | None = None,
        reduce: Callable[[], None] | None = None,
        before_forward: Callable[[int, int], None] | None = None,
        borders: Sequence[Declared] | None = None,
        measure: bool = False,
    ) -> None:
        require_member(group)
        require_chunks(len(stages), group)
        self.group, self.loss, self.reduce, self.before_forward = group, loss, reduce, before_forward
        self.schedule: ScheduleKind = schedule
        self.chunks, self.ranks, self.rank = len(stages), group.size(), group.rank()
        self.last = self.chunks * self.ranks - 1
        self.stages = [
            Stage(module, self.number(chunk), recompute=recompute, trackers=trackers, measure=measure)
            for chunk, module in enumerate(stages)
        ]
        require_borders(borders, [stage.number for stage in self.stages], group)
        self.tied = TiedParameters(tied or {}, group)
        self.record = Record()

    def number(self, chunk: int) -> int:
        """The stage that is this rank's chunk."""
        return chunk * self.ranks + self.rank

    def step(
        self, inputs: Sequence[Tensors] | None, targets: Sequence[Any] | None, micro_batches: int | None = None
    ) -> torch.Tensor | None:
        """Forward and backward of one batch. Every rank of the group must call it.

        inputs: the tensors of each micro-batch, needed on the rank of the first stage; targets: for the loss, needed on
        the rank of the last one. micro_batches: their number, where neither is given. Returns the loss of the batch on
        the rank of the last stage, else None.

        Raises ValueError, on every rank, where there is no micro-batch, one without samples, or ranks differ in their
        number, or for a schedule that they do not fit; StageFailed, on every rank, where a stage raises.
        """
        count = agreed_step(
            inputs, targets, micro_batches, self.number(0) == 0, self.number(self.chunks - 1) == self.last, self.group
        )
        actions = schedule(self.schedule, self.ranks, self.chunks, count)[self.rank]
        self.record = Record()
        self.tied.begin()
        run = _Run(self, inputs or (), targets or ())
        try:
            run.all(actions)
        finally:
            for stage in self.stages:
                stage.drop()
        self._finish()
        return torch.stack(run.losses).sum() if run.losses else None

    def _finish(self) -> None:
        """Gradients of tied parameters are summed before anything is reduced."""
        self.tied.finish()
        if self.reduce is not None:
            self.reduce()


@dataclass(frozen=True)
class _Failure:
    """Why this rank has stopped computing: its own error, or None where another rank told."""

    said: str | None


class _Run:
    """One step. What is computed waits in ``arrived`` for its action: activations and gradients by label."""

    def __init__(self, pipeline: Pipeline, inputs: Sequence[Tensors], targets: Sequence[Any]) -> None:
        self.pipeline, self.inputs, self.targets = pipeline, inputs, targets
        device = next((p.device for stage in pipeline.stages for p in stage.module.parameters()), torch.device("cpu"))
        self.border = Border(pipeline.group, device)
        self.arrived: dict[Label, Sequence[torch.Tensor]] = {}
        self.losses: list[torch.Tensor] = []
        self.failure: _Failure | None = None

    def all(self, actions: Sequence[Action]) -> None:
        """Takes every action. After a failure nothing is computed, but messages still come and go, so that no rank
        waits for what never comes; then all ranks raise."""
        stages = self.pipeline.stages
        if self.pipeline.number(self.pipeline.chunks - 1) == self.pipeline.last:
            self._compute(
                Action("forward", 0, self.pipeline.chunks - 1), lambda: self.pipeline.loss.begin(self.targets)
            )
        for action in actions:
            self._take(action)
            again = stages[action.chunk].again if action.kind == "backward" else 0
            in_flight, stored = sum(stage.in_flight for stage in stages), sum(stage.stored for stage in stages)
            self.pipeline.record.took(action, in_flight, stored + again)
        self.border.finish()
        self._raise_together()

    def _take(self, action: Action) -> None:
        p, stage = self.pipeline, self.pipeline.number(action.chunk)
        if action.kind in ("forward", "backward"):
            self._compute(action, lambda: self._forward(action) if action.kind == "forward" else self._backward(action))
        elif action.kind in ("recv_forward", "recv_backward"):
            forward = action.kind == "recv_forward"
            label = Label("forward" if forward else "backward", stage, action.micro_batch)
            found = self.border.receive((p.rank + (-1 if forward else 1)) % p.ranks, label)
            if found is not None:
                self.arrived[label] = found
            elif self.failure is None:
                self.failure = _Failure(None)
        else:
            forward = action.kind == "send_forward"
            label = (
                Label("forward", stage + 1, action.micro_batch)
                if forward
                else Label("backward", stage - 1, action.micro_batch)
            )
            tensors = None if self.failure else self.arrived.pop(label)
            self.border.send((p.rank + (1 if forward else -1)) % p.ranks, label, tensors)

    def _forward(self, action: Action) -> None:
        p, m, stage = self.pipeline, action.micro_batch, self.pipeline.stages[action.chunk]
        inputs = self.inputs[m] if stage.number == 0 else self.arrived.pop(Label("forward", stage.number, m))
        if p.before_forward is not None:
            p.before_forward(stage.number, m)
        if stage.number < p.last:
            self.arrived[Label("forward", stage.number + 1, m)] = stage.forward(m, inputs)
        else:
            (share,) = stage.forward(m, inputs, lambda output: p.loss.share(output, self.targets[m]))
            self.losses.append(share.detach())

    def _backward(self, action: Action) -> None:
        m, stage = action.micro_batch, self.pipeline.stages[action.chunk]
        last = stage.number == self.pipeline.last
        gradients = stage.backward(m, None if last else self.arrived.pop(Label("backward", stage.number, m)))
        if stage.number > 0:
            self.arrived[Label("backward", stage.number - 1, m)] = gradients

    def _compute(self, action: Action, what: Callable[[], None]) -> None:
        if self.failure is not None:
            return
        try:
            what()
        except (Exception, SystemExit) as error:  # the others wait, whatever way out it takes
            trace = "".join(traceback.format_exception(error)).rstrip()
            module = type(self.pipeline.stages[action.chunk].module).__name__
            self.failure = _Failure(
                f"stage {self.pipeline.number(action.chunk)} ({module}) on rank {dist.get_rank()} failed in the "
                f"{action.kind} of micro-batch {action.micro_batch}: {type(error).__name__}: {error}\n{trace}"
            )

    def _raise_together(self) -> None:
        """Raises on every rank what one of them ran into."""
        group = self.pipeline.group
        said: list[str | None] = [self.failure.said if self.failure else None]
        if group.size() > 1:
            failed = torch.tensor(int(self.failure is not None))
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
            if not failed:
                return
            everyone: list[Any] = [None] * group.size()
            dist.all_gather_object(everyone, said[0], group=group)
            said = everyone
        words = [one for one in said if one is not None]
        if words:
            raise StageFailed("\n".join(words))
