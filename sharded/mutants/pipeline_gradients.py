"""Faults in the gradients of pipelines: scaled, lost or matched wrongly, recomputed with other random numbers, and
copies of a weight that drift apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sharded import loss_normalization, pipeline, pipeline_tied
from sharded.mutants import Mutant, Patch
from sharded.pipeline import Pipeline
from sharded.pipeline_actions import Action
from sharded.pipeline_batch import TokenLoss
from sharded.pipeline_border import Label
from sharded.pipeline_stage import Stage
from sharded.pipeline_tied import TiedParameters
from sharded.sharded_optimizer import Buffer, ShardedOptimizer


def _first_and_last() -> list[Patch]:
    def embedding_group(holders: Sequence[tuple[int, int]], ranks: int) -> list[tuple[int, int]]:
        return [(stage, rank) for stage, rank in holders if rank in (0, ranks - 1)]

    return [(pipeline_tied, "embedding_group", embedding_group)]


def _divided_at_every_stage() -> list[Patch]:
    backward_of_run, share_of_loss = pipeline._Run._backward, TokenLoss.share

    def share(self: TokenLoss, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = share_of_loss(self, output, target)
        if found.requires_grad:
            found.register_hook(lambda gradient: gradient / _micro_batches[0])  # type: ignore[no-untyped-call]
        return found

    def backward(self: pipeline._Run, action: Action) -> None:
        _micro_batches[:] = [len(self.inputs)]
        label = Label("backward", self.pipeline.number(action.chunk), action.micro_batch)
        if label in self.arrived:
            self.arrived[label] = [gradient / _micro_batches[0] for gradient in self.arrived[label]]
        backward_of_run(self, action)

    return [(pipeline._Run, "_backward", backward), (TokenLoss, "share", share)]


_micro_batches = [1]


def summed_after_the_reduction() -> list[Patch]:
    """F46, also of use to the mutants of a whole model."""

    def finish(self: Pipeline) -> None:
        owner = getattr(self.reduce, "__self__", None)  # the optimizer, or the model that has some
        optimizers = [one for one in getattr(owner, "optimizers", [owner]) if isinstance(one, ShardedOptimizer)]
        if self.reduce is None or not optimizers:
            self.tied.finish()
            if self.reduce is not None:
                self.reduce()
            return
        # Each owner's elements are reduced in their place in the gradients; the others' stay the rank's own.
        rank = optimizers[0].group.rank()
        for optimizer, buffer in [(one, buffer) for one in optimizers for buffer in one._buffers]:
            joined = _gradients(buffer)
            buffer.cut.own(joined, rank).copy_(optimizer._reduced(buffer))
            for p, values in zip(buffer.parameters.values(), buffer.cut.tensors(joined), strict=True):
                p.grad = values.view(p.shape).clone()
        self.tied.finish()
        reduced = ShardedOptimizer._reduced
        ShardedOptimizer._reduced = lambda self, buffer: buffer.cut.own(_gradients(buffer), rank).clone()  # type: ignore[method-assign]
        try:
            self.reduce()
        finally:
            ShardedOptimizer._reduced = reduced  # type: ignore[method-assign]

    return [(Pipeline, "_finish", finish)]


def _gradients(buffer: Buffer) -> torch.Tensor:
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in buffer.parameters.values()]
    return buffer.cut.joined(found).clone()


def _random_state_not_restored() -> list[Patch]:
    @contextmanager
    def states_at(self: Stage, states: list[Any]) -> Iterator[None]:
        yield

    return [(Stage, "_random_states_at", states_at)]


def _random_state_left_behind() -> list[Patch]:
    @contextmanager
    def states_at(self: Stage, states: list[Any]) -> Iterator[None]:
        self._load(states)
        yield

    return [(Stage, "_random_states_at", states_at)]


def _only_the_last_micro_batch() -> list[Patch]:
    original = Stage.backward

    def backward(self: Stage, micro_batch: int, gradients: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        self.module.zero_grad()
        return original(self, micro_batch, gradients)

    return [(Stage, "backward", backward)]


def _newest_activation_first() -> list[Patch]:
    original = Stage.backward

    def backward(self: Stage, micro_batch: int, gradients: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        kept = self._kept
        alike = [m for m in kept if [x.shape for x in kept[m].inputs] == [x.shape for x in kept[micro_batch].inputs]]
        kept[micro_batch], kept[alike[-1]] = kept[alike[-1]], kept[micro_batch]
        return original(self, micro_batch, gradients)

    return [(Stage, "backward", backward)]


def _mean_of_means() -> list[Patch]:
    def begin(self: TokenLoss, targets: Sequence[torch.Tensor]) -> None:
        original(self, targets)
        _micro_batches[:] = [len(targets)]

    def share(self: TokenLoss, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        divisor = target.sum() * _micro_batches[0] if self._kind == "token_mean" else self._divisor
        return loss_normalization.share(output, target, self._kind, divisor)

    original = TokenLoss.begin
    return [(TokenLoss, "begin", begin), (TokenLoss, "share", share)]


def _only_the_first_chunk() -> list[Patch]:
    original = pipeline._Run._backward

    def backward(self: pipeline._Run, action: Action) -> None:
        parameters = list(self.pipeline.stages[action.chunk].module.parameters()) if action.chunk else []
        before = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in parameters]
        original(self, action)
        for p, gradient in zip(parameters, before, strict=True):
            if p.requires_grad:
                p.grad = gradient

    return [(pipeline._Run, "_backward", backward)]


def _first_gradient_alone() -> list[Patch]:
    original = Stage.backward

    def backward(self: Stage, micro_batch: int, gradients: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        first, *rest = original(self, micro_batch, gradients) or [torch.zeros(())]
        return [first, *map(torch.zeros_like, rest)] if self.number else []

    return [(Stage, "backward", backward)]


def _summed_again() -> list[Patch]:
    def begin(self: TiedParameters) -> None:
        """What was summed in an earlier step stays where new gradients are added."""

    return [(TiedParameters, "begin", begin)]


MUTANTS = (
    Mutant(
        "F02",
        "pipeline",
        "the embedding group is always {first, last}, whoever holds a copy",
        "NVIDIA-NeMo/Megatron-Bridge#5380",
        _first_and_last,
    ),
    Mutant("F45", "pipeline", "1/m applied at every stage", "deepspeedai/DeepSpeed#8154", _divided_at_every_stage),
    Mutant(
        "F46",
        "pipeline",
        "the sum of the tied embedding comes after the sharded dp reduction",
        "NVIDIA/Megatron-LM#844",
        summed_after_the_reduction,
    ),
    Mutant(
        "F48b",
        "pipeline",
        "recomputation without restoring the random state",
        "allenai/OLMo-core#828",
        _random_state_not_restored,
    ),
    Mutant(
        "F48c", "pipeline", "recomputation leaves the random state of its micro-batch", "own", _random_state_left_behind
    ),
    Mutant("F61", "pipeline", "only the last micro-batch's gradient is kept", "own", _only_the_last_micro_batch),
    Mutant(
        "F62", "pipeline", "a gradient meets the activations of another micro-batch", "own", _newest_activation_first
    ),
    Mutant(
        "F64", "pipeline", "the mean of the micro-batches' means instead of that over tokens", "own", _mean_of_means
    ),
    Mutant("F65", "pipeline", "gradients of a rank's first chunk alone", "own", _only_the_first_chunk),
    Mutant(
        "F67",
        "pipeline",
        "of several tensors across a border the first alone gets a gradient",
        "own",
        _first_gradient_alone,
    ),
    Mutant("F68", "pipeline", "tied gradients that were summed before are summed again", "own", _summed_again),
)
