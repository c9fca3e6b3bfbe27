"""A GPT whose layers and vocabulary are cut over a tensor-parallel group (Megatron-LM, arXiv 1909.08053, section 3).

Logits stay cut: the loss is taken from each rank's columns.

Legend: S positions (s where sequence parallelism cuts them), B sequences, H hidden, V vocabulary (v this rank's rows of
the embedding, and columns of the logits), L layers; T = S x B.

| | forward | backward |
|---|---|---|
| plain | 1 + 2 L all-reduces T x H; loss: 3 all-reduces T | 1 + 2 L all-reduces T x H |
| sequence_parallel | 1 + 2 L of reduce-scatter and all-gather each; loss as above | as many, and 1 + 2 L all-gathers |
"""

from __future__ import annotations

from typing import Unpack

import torch

from sharded.attention_core import Mask
from sharded.cross_entropy import Reduction, vocab_parallel_cross_entropy
from sharded.embedding import VocabParallelEmbedding
from sharded.gpt_stages import GPTStage
from sharded.random import RandomTracker
from sharded.transformer import LayerOptions


class GPT(GPTStage):
    """Parts embedding, positions (None where not built), layers, norm and output.

    vocabulary, hidden, heads, ffn, layers: V, H, and of each `TransformerLayer`.
    tied: the logits are taken with the embedding's weight (arXiv 1608.05859), else with one of the output's own.
    positions: so many learned position embeddings; None where there are none, as with rotary embedding.
    divisible_by: as in `VocabParallelEmbedding`. Options: see TransformerLayer; all layers draw from one tracker.

    forward: ids [S, B] -> logits [S, B, v]; with targets [S, B]: their loss, in fp32 at least.

    After the last backward, `sharded.transformer.finish_gradients` completes the gradients.
    """

    embedding: VocabParallelEmbedding

    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        heads: int,
        ffn: int,
        layers: int,
        *,
        tied: bool = True,
        positions: int | None = None,
        divisible_by: int = 1,
        tracker: RandomTracker | None = None,
        seed: int = 0,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(
            vocabulary,
            hidden,
            heads,
            ffn,
            range(layers),
            first=True,
            last=True,
            tied=tied,
            positions=positions,
            divisible_by=divisible_by,
            tracker=tracker,
            seed=seed,
            **options,
        )

    def forward(
        self,
        ids: torch.Tensor,
        targets: torch.Tensor | None = None,
        *,
        mask: Mask = "causal",
        reduction: Reduction = "mean",
    ) -> torch.Tensor:
        """mask: as in TransformerLayer. reduction: as in vocab_parallel_cross_entropy."""
        self._require_ids(ids)
        logits = self.logits(self.through(self.embed(ids), mask=mask))
        if targets is None:
            return logits
        return vocab_parallel_cross_entropy(
            logits,
            targets,
            group=self.group,
            vocabulary=self.vocabulary,
            columns=self.embedding.rows,
            reduction=reduction,
        )

    def _require_ids(self, ids: torch.Tensor) -> None:
        if ids.dim() != 2:
            raise ValueError(f"ids of shape {tuple(ids.shape)}: expected [positions, sequences]")
        if self.sequence_parallel and ids.shape[0] % self.group.size():
            raise ValueError(
                f"{ids.shape[0]} positions over {self.group.size()} ranks: sequence_parallel needs a length that their "
                "number divides; pad the sequence"
            )
        if self.positions is not None and ids.shape[0] > len(self.positions.weight):
            raise ValueError(
                f"{ids.shape[0]} positions with positions={len(self.positions.weight)}: expected no more than those"
            )
