"""A GPT on tensor-, pipeline- and data-parallel ranks: one step of the whole batch.

After the last backward gradients are completed in this order, as each step needs the one before: copies of a tied
embedding are summed over the pipeline; what is partial is summed over the tensor-parallel group; then the
data-parallel ranks' gradients are, into all of them or into the shards of an optimizer.

Collectives beyond those of the stages: for each dtype one all-reduce of all gradients over the data-parallel group,
and one for each weight over the vocabulary; or those of the optimizers, likewise apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

import torch
from torch import nn
from torch.distributed import ProcessGroup

from sharded.gpt_stages import GPTLoss, GPTStage
from sharded.initialization import derived_seed
from sharded.loss_normalization import over_ranks
from sharded.partial_gradients import sum_over_group
from sharded.pipeline import Pipeline
from sharded.pipeline_schedules import ScheduleKind
from sharded.random import RandomTracker, States
from sharded.sharded_optimizer import ShardedOptimizer
from sharded.transformer import LayerOptions, finish_gradients

#: Makes an optimizer, sharded over the data-parallel group, of named parameters.
MakeOptimizer = Callable[[Sequence[tuple[str, nn.Parameter]]], ShardedOptimizer]


class ParallelGPT:
    """This rank's stages of a GPT, and how a batch goes through them.

    stages: the numbers of the layers of every stage of the whole pipeline, as many stages as a multiple of its ranks:
        `sharded.pipeline_batch.deal` makes such lists. tensor, pipeline, data: this rank's groups along those axes.
    schedule: see `sharded.pipeline_schedules`. recompute_stages: keep each stage's inputs alone.
    optimizer: makes the optimizers that reduce the gradients, and step, at the end of `step`; without it gradients are
        summed over the data-parallel ranks, and stay in ``grad`` or ``main_grad``; or, with reduces=False, they stay
        those of each data-parallel rank, for a trainer that reduces them.
    The rest as in `GPTStage`.

    Raises ValueError, on every rank, where the stages do not fit the ranks of the pipeline.
    """

    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        heads: int,
        ffn: int,
        stages: Sequence[Sequence[int]],
        *,
        tensor: ProcessGroup,
        pipeline: ProcessGroup,
        data: ProcessGroup,
        schedule: ScheduleKind = "1f1b",
        recompute_stages: bool = False,
        optimizer: MakeOptimizer | None = None,
        reduces: bool = True,
        tied: bool = True,
        divisible_by: int = 1,
        positions: int | None = None,
        seed: int = 0,
        **options: Unpack[LayerOptions],
    ) -> None:
        ranks, count = pipeline.size(), len(stages)
        if count < 1 or count % ranks:
            raise ValueError(f"{count} stages on {ranks} ranks of a pipeline: expected a multiple, as many on each")
        self.tensor, self.pipeline, self.data = tensor, pipeline, data
        self.tied, self.reduces = tied and len(stages) > 1, reduces
        #: Called when this rank's backwards are done, before gradients are completed.
        self.after_backward: Callable[[], None] | None = None
        #: Called with stage and micro-batch before a forward that is not computed again in backward.
        self.before_forward: Callable[[int, int], None] | None = None
        self.numbers = range(pipeline.rank(), count, ranks)
        self.layers = {number: list(stages[number]) for number in self.numbers}
        options["group"] = tensor
        self.stages = [
            GPTStage(
                vocabulary,
                hidden,
                heads,
                ffn,
                stages[number],
                first=number == 0,
                last=number == count - 1,
                tied=tied,
                positions=positions,
                divisible_by=divisible_by,
                tracker=RandomTracker(derived_seed(seed, "dropout", number), tensor),
                seed=seed,
                **options,
            )
            for number in self.numbers
        ]
        rows = -(-vocabulary // divisible_by) * divisible_by
        copies = [(n, s.embedding.weight) for n, s in zip(self.numbers, self.stages, strict=True) if s.embedding]
        self._loss = GPTLoss(vocabulary, rows, tensor, data)
        self._engine = Pipeline(
            self.stages,
            pipeline,
            self._loss,
            schedule=schedule,
            recompute=recompute_stages,
            trackers=[stage.tracker for stage in self.stages] if recompute_stages else (),
            tied={"embedding": copies} if self.tied else None,
            reduce=self._completed,
            before_forward=self._begins,
        )
        self._alone = [p for stage in self.stages for p in vocabulary_weights(stage)]
        placed = zip(self.numbers, self.stages, strict=True)
        named = [(f"{number}.{name}", p) for number, stage in placed for name, p in stage.named_parameters()]
        self._optimizes = optimizer is not None
        self.optimizers = [] if optimizer is None else [optimizer(some) for some in self.apart(named)]

    def step(
        self,
        ids: Sequence[torch.Tensor],
        targets: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        scale: float = 1.0,
    ) -> torch.Tensor | None:
        """Forward and backward of a batch, and what completes its gradients. Every rank of all groups must call it.

        ids: of each micro-batch, int64 [sequences, positions]; targets: see `GPTLoss`. Ranks along the tensor and
        pipeline groups get the same. scale: gradients are those of the loss times it. Returns the loss of the whole
        batch, of all data-parallel ranks, on the ranks of the last stage, else None.
        """
        self._loss.scale = scale
        share = self._engine.step([(one,) for one in ids], targets)
        return None if share is None else over_ranks(share if scale == 1 else share / scale, self.data)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Those of this rank, by their names in the whole model, as ``layers.3.attention.q.weight``. A tied output has
        the name ``output.weight``, also where it is the embedding itself."""
        found: dict[str, nn.Parameter] = {}
        for number, stage in zip(self.numbers, self.stages, strict=True):
            for name, parameter in stage.named_parameters():
                if name.startswith("layers."):
                    _, at, rest = name.split(".", 2)
                    found[f"layers.{self.layers[number][int(at)]}.{rest}"] = parameter
                elif stage.first or not name.startswith("embedding."):
                    found[name] = parameter
            if stage.last and stage.tied and stage.embedding is not None:
                found["output.weight"] = stage.embedding.weight
        return found

    def random_states(self) -> dict[int, States]:
        """Where the random streams of this rank's stages are, by their numbers."""
        return {number: stage.tracker.state() for number, stage in zip(self.numbers, self.stages, strict=True)}

    def load_random_states(self, states: Mapping[int, States]) -> None:
        """Puts the streams where they were. Raises KeyError for a stage that is missing."""
        for number, stage in zip(self.numbers, self.stages, strict=True):
            stage.tracker.load(states[number])

    def _begins(self, stage: int, micro_batch: int) -> None:
        if self.before_forward is not None:
            self.before_forward(stage, micro_batch)

    def _completed(self) -> None:
        if self.after_backward is not None:
            self.after_backward()
        self._complete()

    def _complete(self) -> None:
        """Every rank of the groups along tp and dp holds the same stages, and so calls the same."""
        for stage in self.stages:
            finish_gradients(stage, self.tensor)
        if self._optimizes:
            for optimizer in self.optimizers:
                optimizer.step()
            return
        if not self.reduces:
            return
        for some in self.apart([("", p) for stage in self.stages for p in stage.parameters()]):
            sum_over_ranks([p for _, p in some], self.data)

    def apart(self, named: Sequence[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
        """Each weight over the vocabulary by itself, then the others together. In one buffer an element's place, and
        the buffer's length, decide in which order a collective adds its parts. Copies of a tied weight, in other
        places, would get other bits and drift apart; and so would what all tensor-parallel ranks hold, beside weights
        of which they hold different numbers of rows."""
        alone = [[(name, p)] for name, p in named if any(p is weight for weight in self._alone)]
        rest = [(name, p) for name, p in named if not any(p is weight for weight in self._alone)]
        return [*alone, rest] if rest else alone


def vocabulary_weights(stage: GPTStage) -> list[nn.Parameter]:
    """Those that a stage has: of the embedding, and of an output of its own."""
    parts: list[nn.Module | None] = [stage.embedding, stage.output]
    return [p for part in parts if part is not None for p in part.parameters()]


def sum_over_ranks(parameters: Sequence[torch.Tensor], group: ProcessGroup) -> None:
    """Sums every parameter's gradient over the group, one all-reduce for each dtype."""
    sum_over_group([(parameter, group.size()) for parameter in parameters], group)
