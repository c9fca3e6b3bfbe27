"""One pre-norm transformer layer over a tensor-parallel group (Megatron-LM, arXiv 1909.08053, section 3), with or
without sequence parallelism (arXiv 2205.05198).

    y = x + dropout(attention(norm1(x)))
    z = y + dropout(mlp(norm2(y)))

Legend: S positions (s where sequence parallelism cuts them), B sequences, H hidden; T = S x B.

| | forward | backward |
|---|---|---|
| plain | 2 all-reduces T x H | 2 all-reduces T x H |
| sequence_parallel | 2 all-gathers, 2 reduce-scatters | the same, and 2 all-gathers for the weights' gradients |

Recomputation in full repeats the forward's in backward; selective recomputation adds none.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, Unpack

import torch
from torch import nn
from torch.distributed import ProcessGroup

from sharded.attention import SelfAttention
from sharded.attention_core import Mask
from sharded.initialization import derived_seed
from sharded.mlp import MLP, Activation
from sharded.norms import Kind
from sharded.norms import norm as make_norm
from sharded.parallel_linear import BlockOptions
from sharded.partial_gradients import finish_partial_gradients
from sharded.process_groups import default_group
from sharded.random import RandomTracker, Stream, dropout, require_probability
from sharded.recompute import checkpoint
from sharded.sequence_parallel import finish_sequence_parallel_gradients

Recompute: TypeAlias = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


class LayerOptions(BlockOptions, total=False):
    """The keywords that a model hands to each of its layers; meaning and defaults are TransformerLayer's."""

    kv_heads: int | None
    norm: Kind
    activation: Activation
    qk_norm: bool
    rotary: bool
    recompute: Recompute
    attention_dropout: float
    hidden_dropout: float


class TransformerLayer(nn.Module):
    """Parts norm1, attention (q, k, v, o, q_norm, k_norm), norm2 and mlp (gate, up, down).

    hidden, heads, ffn, kv_heads: H, and the sizes of `SelfAttention` and `MLP`.
    norm: "layer" (with a bias) or "rms". qk_norm: a norm of that kind over each head of queries and keys.
    recompute: what backward computes again instead of keeping it: "none", "selective" (scores and probabilities of
        attention) or "full" (all but the layer's input).
    attention_dropout, hidden_dropout: in training, of the probabilities and of what is added to the residual.
    tracker: the random streams of the dropout; by default the layer's own, from its seed.
    Options and seed: see ParallelLinear; each parameter has a random stream of its own.

    forward: x [S, B, H] -> [S, B, H]; sequence_parallel: [s, B, H] -> [s, B, H].

    After the last backward, `finish_gradients` completes the gradients that are partial on each rank.
    Raises TypeError or ValueError, on every rank and before anything is sent, for an argument it cannot work with.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        ffn: int,
        *,
        kv_heads: int | None = None,
        norm: Kind = "layer",
        activation: Activation = "gelu",
        qk_norm: bool = False,
        rotary: bool = False,
        recompute: Recompute = "none",
        attention_dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        tracker: RandomTracker | None = None,
        seed: int = 0,
        **options: Unpack[BlockOptions],
    ) -> None:
        super().__init__()
        for name, value, known in (("norm", norm, ("layer", "rms")), ("recompute", recompute, RECOMPUTES)):
            if value not in known:
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(known)}")
        require_probability("hidden_dropout", hidden_dropout)
        self.group = options["group"] = options.get("group") or default_group()
        self.sequence_parallel = options.get("sequence_parallel", False)
        self.hidden, self.hidden_dropout, self.recompute = hidden, hidden_dropout, recompute
        self.tracker = RandomTracker(derived_seed(seed, "dropout"), self.group) if tracker is None else tracker
        self.norm1 = make_norm(norm, hidden, options, sequence_parallel=self.sequence_parallel)
        self.attention = SelfAttention(
            hidden,
            heads,
            tracker=self.tracker,
            kv_heads=kv_heads,
            qk_norm=norm if qk_norm else None,
            rotary=rotary,
            dropout=attention_dropout,
            recompute=recompute == "selective",
            seed=derived_seed(seed, "attention"),
            **options,
        )
        self.norm2 = make_norm(norm, hidden, options, sequence_parallel=self.sequence_parallel)
        self.mlp = MLP(hidden, ffn, activation=activation, seed=derived_seed(seed, "mlp"), **options)

    def forward(self, x: torch.Tensor, *, mask: Mask = "causal", sequence_length: int | None = None) -> torch.Tensor:
        """mask: None, "causal" or the keys [B, S] that all queries of a sequence see. sequence_length: S."""
        self._require_input(x, sequence_length)

        def layer(x: torch.Tensor) -> torch.Tensor:
            y = x + self._dropped(self.attention(self.norm1(x), mask=mask, sequence_length=sequence_length))
            return y + self._dropped(self.mlp(self.norm2(y), sequence_length=sequence_length))

        return checkpoint(layer, x, tracker=self.tracker) if self.recompute == "full" else layer(x)

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        stream: Stream = "sharded" if self.sequence_parallel else "replicated"
        return dropout(x, self.hidden_dropout if self.training else 0.0, self.tracker, stream)

    def _require_input(self, x: torch.Tensor, sequence_length: int | None) -> None:
        if x.dim() != 3 or x.shape[-1] != self.hidden:
            raise ValueError(f"the input has shape {tuple(x.shape)}: expected [positions, sequences, {self.hidden}]")
        if sequence_length is None:
            return
        n = self.group.size() if self.sequence_parallel else 1
        if sequence_length % n:
            raise ValueError(
                f"sequence_length={sequence_length} over {n} ranks: sequence_parallel needs a length that their number "
                "divides; pad the sequence"
            )
        if x.shape[0] * n != sequence_length:
            raise ValueError(
                f"the input has {x.shape[0]} positions: expected {sequence_length // n}, of {sequence_length} over {n}"
            )


def finish_gradients(module: nn.Module, group: ProcessGroup | None = None) -> None:
    """Completes the gradients that each rank has only a part of, once after the last backward of a step.

    group: by default the module's. Every rank of it must call this.
    """
    ranks: Any = module.group if group is None else group
    parameters = list(module.parameters())
    finish_sequence_parallel_gradients(parameters, ranks)
    finish_partial_gradients(parameters, ranks)
