"""The adapters of libraries that ship, each with one mistake of an adapter or a trainer: what they hold, a harness that
looks must not hold."""

from __future__ import annotations

from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module

from harness import PartOf, Sharded
from harness.candidates import megatron_core_transformer, torch_transformer
from harness.candidates.builtin import Builtin
from harness.candidates.megatron_core import MegatronCore
from harness.candidates.megatron_core_on_cpu import Generator
from harness.candidates.torch_native import TorchNative
from reference.collectives import CollectivesCase
from reference.transformer import TransformerCase


class MegatronUnfinished(MegatronCore):
    """The trainer does not sum what ranks have parts of."""

    name: ClassVar[str] = "megatron-core, unfinished"

    def transformer_layer(self, case: TransformerCase) -> Sharded:
        made = super().transformer_layer(case)
        made.finish = None
        return made


class MegatronKeysForValues(MegatronCore):
    name: ClassVar[str] = "megatron-core, keys for values"

    def transformer_layer(self, case: TransformerCase) -> Sharded:
        made = super().transformer_layer(case)
        swapped = {"k_weight": "v_weight", "v_weight": "k_weight", "k_bias": "v_bias", "v_bias": "k_bias"}
        made.parameters = {swapped.get(name, name): tensor for name, tensor in made.parameters.items()}
        return made


class MegatronUpForGate(MegatronCore):
    name: ClassVar[str] = "megatron-core, up for gate"

    def transformer_layer(self, case: TransformerCase) -> Sharded:
        made = super().transformer_layer(case)
        if case.activation == "swiglu":
            fused = made.parameters["up_weight"]
            assert isinstance(fused, PartOf)
            made.parameters["up_weight"] = PartOf(fused.tensor, lambda w: w.chunk(2)[0])
            made.parameters["gate_weight"] = PartOf(fused.tensor, lambda w: w.chunk(2)[1])
        return made


class MegatronOneStream(MegatronCore):
    """All ranks seed their own stream alike."""

    name: ClassVar[str] = "megatron-core, one stream"

    def dropout_masks(self, case: TransformerCase) -> dict[str, torch.Tensor]:
        with patch.object(megatron_core_transformer, "Generator", lambda seed, rank: Generator(seed, 0)):
            return super().dropout_masks(case)


class MegatronForgetful(MegatronCore):
    """Recomputation goes on with the random state that it finds."""

    name: ClassVar[str] = "megatron-core, forgetful"

    def transformer_layer(self, case: TransformerCase) -> Sharded:
        from megatron.core.tensor_parallel import random

        random._set_all_rng_states = lambda *_: None
        return super().transformer_layer(case)


class BuiltinUnmasked(Builtin):
    """Attention sees everything."""

    name: ClassVar[str] = "builtin, unmasked"

    def transformer_layer(self, case: TransformerCase) -> Sharded:
        made = super().transformer_layer(case)
        layer: Any = made.module
        made.forward = lambda x: layer(x, mask=None)
        return made


class BuiltinUnscaled(Builtin):
    """What is kept of what is added to the residual is not scaled."""

    name: ClassVar[str] = "builtin, unscaled"

    def transformer_layer(self, case: TransformerCase) -> Sharded:
        made = super().transformer_layer(case)
        layer: Any = made.module
        dropped = layer._dropped
        layer._dropped = lambda x: dropped(x) * (1 - case.dropout)
        return made


class BuiltinUndropped(Builtin):
    """Nothing is dropped of what is added to the residual."""

    name: ClassVar[str] = "builtin, undropped"

    def transformer_layer(self, case: TransformerCase) -> Sharded:
        made = super().transformer_layer(case)
        made.module.hidden_dropout = 0.0  # type: ignore[attr-defined]
        return made


class BuiltinOneMask(Builtin):
    """All sequences are dropped alike."""

    name: ClassVar[str] = "builtin, one mask"

    def transformer_layer(self, case: TransformerCase) -> Sharded:
        made = super().transformer_layer(case)
        layer: Any = made.module
        dropped = layer._dropped
        layer._dropped = lambda x: x * dropped(torch.ones_like(x[:, :1]))
        return made


class TorchUnreduced(TorchNative):
    """Reads the rank's part of a gradient that is still partial."""

    name: ClassVar[str] = "torch, unreduced"

    def transformer_layer(self, case: TransformerCase) -> Sharded:
        made = super().transformer_layer(case)
        made.read_grad = lambda p: p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        return made


class TorchHeadNormsUnplanned(TorchNative):
    """Norms of heads have no style: each rank keeps the gradient of its own heads."""

    name: ClassVar[str] = "torch, head norms unplanned"

    def transformer_layer(self, case: TransformerCase) -> Sharded:
        made = super().transformer_layer(case)
        plan = torch_transformer.plan_of(case)
        kept = {name: style for name, style in plan.items() if not name.endswith(("q_norm", "k_norm"))}
        layer: Any = parallelize_module(torch_transformer.Layer(case), self.device_mesh[case.axis], kept)
        parameters, layouts = torch_transformer.parameters(case, layer)
        masks = iter(torch_transformer.masks(case))
        return Sharded(
            layer, forward=lambda x: layer(x, next(masks)), parameters=parameters, read_grad=made.read_grad, **layouts
        )


class TorchCopyUnsummed(TorchNative):
    """A copy's ``to_local`` is not told that its gradient is partial."""

    name: ClassVar[str] = "torch, copy unsummed"

    def collective(self, case: CollectivesCase) -> Sharded:
        if case.kind != "copy":
            return super().collective(case)
        mesh = self.device_mesh[case.axis]
        return Sharded(lambda x: DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local())
