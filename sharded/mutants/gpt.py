"""Faults in a GPT on several kinds of ranks: gradients that are completed too late, over too few ranks, or not at all,
and means over other tokens than those of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from sharded import gpt_parallel, gpt_stages, initialization, norms, pipeline_tied, random
from sharded.gpt_parallel import ParallelGPT
from sharded.gpt_stages import GPTLoss
from sharded.mutants import Mutant, Patch, pipeline_gradients
from sharded.norms import Norm
from sharded.parallel_linear import PartOptions
from sharded.pipeline import Pipeline
from sharded.positions import Positions
from sharded.random import RandomTracker, Stream
from sharded.transformer import finish_gradients


def _positions_left_out() -> list[Patch]:
    init, sum_over_ranks = Positions.__init__, gpt_parallel.sum_over_ranks

    def marking(self: Positions, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self.weight.of_positions = True  # type: ignore[attr-defined]

    def without_positions(parameters: Sequence[torch.Tensor], group: ProcessGroup) -> None:
        sum_over_ranks([p for p in parameters if not hasattr(p, "of_positions")], group)

    return [(Positions, "__init__", marking), (gpt_parallel, "sum_over_ranks", without_positions)]


def _final_norm_not_marked() -> list[Patch]:
    def norm(kind: norms.Kind, width: int, options: PartOptions, *, sequence_parallel: bool = False) -> Norm:
        return norms.norm(kind, width, options)

    return [(gpt_stages, "norm", norm)]


def _mean_of_the_ranks_means() -> list[Patch]:
    def begin(self: GPTLoss, targets: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        original(self, targets)
        group = self._tokens._group
        own = torch.stack([valid.sum() for _, valid in targets]).sum()
        self._tokens._divisor = own * (1 if group is None else group.size())

    original = GPTLoss.begin
    return [(GPTLoss, "begin", begin)]


def _partial_gradients_stepped_with() -> list[Patch]:
    original = ParallelGPT._complete

    def complete(self: ParallelGPT) -> None:
        if not self._optimizes:
            original(self)
            return
        for optimizer in self.optimizers:
            optimizer.step()
        for stage in self.stages:
            finish_gradients(stage, self.tensor)

    return [(ParallelGPT, "_complete", complete)]


def _tied_sum_of_grad() -> list[Patch]:
    def no_buffer(parameter: torch.Tensor) -> torch.Tensor | None:
        """What is looked at is ``grad``."""
        return None

    return [(pipeline_tied, "buffer_of", no_buffer)]


def _tied_among_others() -> list[Patch]:
    def together(self: ParallelGPT, named: Sequence[Any]) -> list[list[Any]]:
        return [list(named)] if named else []

    return [(ParallelGPT, "apart", together)]


def _tied_summed_in_shards() -> list[Patch]:
    """Where the copies are cut alike, the order would not matter: an owner has the same elements of both."""

    def from_the_end(self: ParallelGPT, named: Sequence[Any]) -> list[list[Any]]:
        """The last stage has the copy at the other end of its buffer."""
        last = any(stage.last for stage in self.stages)
        return [list(named)[::-1] if last else list(named)] if named else []

    return [*pipeline_gradients.summed_after_the_reduction(), (ParallelGPT, "apart", from_the_end)]


def _stages_alike() -> list[Patch]:
    def derived_seed(seed: int, *names: str | int) -> int:
        return initialization.derived_seed(seed, *[name for name in names if not isinstance(name, int)])

    return [(gpt_parallel, "derived_seed", derived_seed)]


def _computed_again_otherwise() -> list[Patch]:
    def without_trackers(*arguments: Any, **options: Any) -> Pipeline:
        return Pipeline(*arguments, **{**options, "trackers": ()})

    return [(gpt_parallel, "Pipeline", without_trackers)]


def _embedded_dropped_alike() -> list[Patch]:
    def dropout(x: torch.Tensor, p: float, tracker: RandomTracker, stream: Stream) -> torch.Tensor:
        return random.dropout(x, p, tracker, "replicated")

    return [(gpt_stages, "dropout", dropout)]


MUTANTS = (
    Mutant(
        "F46b",
        "gpt",
        "the sum of the tied embedding comes after the sharded dp reduction, whose shards differ between its stages",
        "NVIDIA/Megatron-LM#844",
        _tied_summed_in_shards,
    ),
    Mutant(
        "F71", "gpt", "the position embedding's gradient is left out of the sum over dp", "own", _positions_left_out
    ),
    Mutant(
        "F72",
        "gpt",
        "the final norm's gradient under sequence parallelism is not summed over tp on the last stage",
        "own",
        _final_norm_not_marked,
    ),
    Mutant(
        "F73",
        "gpt",
        "the mean of the dp ranks' means instead of the mean over all tokens",
        "pytorch/torchtitan#2206",
        _mean_of_the_ranks_means,
    ),
    Mutant(
        "F74",
        "gpt",
        "the sharded optimizer steps before partial gradients are summed over tp",
        "own",
        _partial_gradients_stepped_with,
    ),
    Mutant(
        "F75",
        "gpt",
        "copies of the tied embedding are summed in grad where gradients are in main_grad",
        "own",
        _tied_sum_of_grad,
    ),
    Mutant(
        "F76",
        "gpt",
        "copies of the tied embedding are reduced over dp in buffers with others: their bits drift apart",
        "own",
        _tied_among_others,
    ),
    Mutant("F92", "gpt", "all stages of the pipeline draw the same dropout masks", "own", _stages_alike),
    Mutant(
        "F93",
        "gpt",
        "a stage that is computed again draws other dropout masks",
        "own",
        _computed_again_otherwise,
    ),
    Mutant(
        "F94",
        "gpt",
        "under sequence parallelism all tp ranks drop the same positions of what they embed",
        "own",
        _embedded_dropped_alike,
    ),
)
