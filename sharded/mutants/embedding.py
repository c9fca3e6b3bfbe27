"""Faults in the vocabulary-parallel embedding."""

from __future__ import annotations

import torch

from sharded.embedding import VocabParallelEmbedding
from sharded.mutants import Mutant, Patch


def _padding_idx_of_every_shard() -> list[Patch]:
    def own_padding_idx(self: VocabParallelEmbedding) -> int | None:
        return self.padding_idx if self.padding_idx is not None and self.padding_idx < self.own_rows else None

    return [(VocabParallelEmbedding, "_own_padding_idx", own_padding_idx)]


def _rows_lost_by_floor() -> list[Patch]:
    def elsewhere(self: VocabParallelEmbedding, rows: torch.Tensor) -> torch.Tensor:
        # What n times the floor does not reach is on no rank; the other rows stay where they are.
        reached = self.rows // self.group.size() * self.group.size()
        return (rows < 0) | (rows >= self.own_rows) | (rows + self.first_row >= reached)

    return [(VocabParallelEmbedding, "_elsewhere", elsewhere)]


MUTANTS = (
    Mutant(
        "F19",
        "embedding",
        "the global padding index is applied to every shard's table",
        "pytorch/torchtitan#4637",
        _padding_idx_of_every_shard,
    ),
    Mutant(
        "F23",
        "embedding",
        "the vocabulary is split by floor: the last rows are lost",
        "huggingface/text-generation-inference#1463",
        _rows_lost_by_floor,
    ),
)
