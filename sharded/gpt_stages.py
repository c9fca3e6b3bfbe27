"""A GPT cut into stages for a pipeline (Megatron-LM, arXiv 2104.04473, section 2.2).

The first stage has the embeddings, the last one the final norm, the output and the loss, and each has some of the
layers, maybe none. A tied embedding is on the first and on the last stage: two copies with the same values, whose
gradients have to be summed (`sharded.pipeline_tied`).

Legend: S positions (s where sequence parallelism cuts them), B sequences, H hidden, v this rank's columns of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import nn
from torch.distributed import ProcessGroup

from sharded.attention_core import Mask
from sharded.cross_entropy import vocab_parallel_cross_entropy
from sharded.embedding import VocabParallelEmbedding
from sharded.initialization import derived_seed
from sharded.linear import ColumnParallelLinear
from sharded.norms import Norm, norm
from sharded.parallel_linear import PartOptions
from sharded.pipeline_batch import TokenLoss
from sharded.positions import Positions
from sharded.process_groups import default_group
from sharded.random import RandomTracker, Stream, dropout
from sharded.transformer import LayerOptions, TransformerLayer


class GPTStage(nn.Module):
    """Parts embedding and positions (first), layers, norm and output (last); None where not built. The last stage of a
    tied model has an embedding too, its copy, and its output has no weight.

    layers: the numbers of its layers in the whole model. first, last: whether it is that stage; both where there is no
    other. The rest as in `sharded.gpt.GPT`: with the same seed, the parameters are those of the whole model.

    forward: ids [B, S] on the first stage, sequences first, else x [S, B, H] ([s, B, H]) -> x, or on the last stage
    logits [S, B, v].
    """

    embedding: VocabParallelEmbedding | None
    positions: Positions | None
    norm: Norm | None
    output: ColumnParallelLinear | None

    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        heads: int,
        ffn: int,
        layers: Sequence[int],
        *,
        first: bool,
        last: bool,
        tied: bool = True,
        positions: int | None = None,
        divisible_by: int = 1,
        tracker: RandomTracker | None = None,
        seed: int = 0,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        group = options["group"] = options.get("group") or default_group()
        self.group, self.vocabulary, self.tied, self.first, self.last = group, vocabulary, tied, first, last
        self.sequence_parallel = options.get("sequence_parallel", False)
        self.hidden_dropout = options.get("hidden_dropout", 0.0)
        self.tracker = RandomTracker(derived_seed(seed, "dropout"), group) if tracker is None else tracker
        own: PartOptions = {
            "group": group,
            "sequence_parallel": self.sequence_parallel,
            "main_grad": options.get("main_grad", False),
            "dtype": options.get("dtype"),
            "device": options.get("device"),
            "init": options.get("init", "full"),
        }
        self.embedding = self.positions = self.norm = self.output = None
        rows = -(-vocabulary // divisible_by) * divisible_by
        if first or (last and tied):
            self.embedding = VocabParallelEmbedding(
                vocabulary, hidden, divisible_by=divisible_by, seed=derived_seed(seed, "embedding"), **own
            )
        if first and positions is not None:
            self.positions = Positions(positions, hidden, seed=derived_seed(seed, "positions"), **own)
        self.layers = nn.ModuleList(
            TransformerLayer(hidden, heads, ffn, tracker=self.tracker, seed=derived_seed(seed, "layer", i), **options)
            for i in layers
        )
        if last:
            self.norm = norm(options.get("norm", "layer"), hidden, own, sequence_parallel=self.sequence_parallel)
            self.output = ColumnParallelLinear(
                hidden, rows, bias=False, build_weight=not tied, seed=derived_seed(seed, "output"), **own
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.embed(x.T)
        x = self.through(x, mask="causal")
        return self.logits(x) if self.last else x

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[S, B] -> [S, B, H]"""
        assert self.embedding is not None
        x: torch.Tensor = self.embedding(ids)
        if self.positions is not None:
            x = self.positions(x, ids.shape[0])
        stream: Stream = "sharded" if self.sequence_parallel else "replicated"
        return dropout(x, self.hidden_dropout if self.training else 0.0, self.tracker, stream)

    def through(self, x: torch.Tensor, *, mask: Mask) -> torch.Tensor:
        """Its layers, [S, B, H] -> [S, B, H]. Positions that are cut are cut evenly."""
        length = x.shape[0] * (self.group.size() if self.sequence_parallel else 1)
        for layer in self.layers:
            x = layer(x, mask=mask, sequence_length=length)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[S, B, H] -> [S, B, v]"""
        assert self.norm is not None
        assert self.output is not None
        weight = self.embedding.weight if self.tied and self.embedding is not None else None
        found: torch.Tensor = self.output(self.norm(x), weight)
        return found


class GPTLoss:
    """The loss of the last stage's logits, a mean over the valid tokens of the whole batch: of all micro-batches, and
    of all ranks of a data-parallel group, so that the sum of all ranks' shares is the loss.

    A target is a pair: tokens int64 [B, S], and which of them are valid, bool [B, S]. ``scale``: by what all shares are
    multiplied.
    """

    def __init__(self, vocabulary: int, rows: int, group: ProcessGroup, data_parallel: ProcessGroup) -> None:
        """rows: of the whole table, with those of no token. group: over which the logits are cut."""
        self._vocabulary, self._rows, self._group = vocabulary, rows, group
        self._tokens = TokenLoss("token_mean", data_parallel)
        self.scale = 1.0

    def begin(self, targets: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._tokens.begin([valid for _, valid in targets])

    def share(self, output: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        tokens, valid = target
        losses = vocab_parallel_cross_entropy(
            output, tokens.T, group=self._group, vocabulary=self._vocabulary, columns=self._rows, reduction="none"
        )
        share = self._tokens.share(losses.T, valid)
        return share if self.scale == 1 else share * self.scale
