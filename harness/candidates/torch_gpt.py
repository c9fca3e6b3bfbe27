"""A GPT in plain torch around the layers of `torch_transformer`, cut over tp and dp as torch's tutorials and torchtitan
do it: ``parallelize_module`` over tp, then ``fully_shard`` over dp of each layer and of the whole.

Over tp every parameter is a DTensor, replicated ones too: ``clip_grad_norm_`` takes no mixture of meshes. Over one rank
along tp nothing is parallelized. FSDP cuts each rank's part along its first dimension, in chunks.

Legend: S tokens, B sequences, H hidden, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from harness.candidates.torch_transformer import Layer, masks, new_norm, parameters, plan_of
from harness.local import as_local
from reference.gpt import GptCase
from reference.gpt_parameters import layer_name
from reference.layout import Layout, Split, placements
from reference.transformer import TransformerCase

GPT_FEATURES = (
    "gpt_gpipe",
    "gpt_untied",
    "gpt_tied",
    "gpt_learned_positions",
    "gpt_rotary",
    "gpt_no_positions",
    "gpt_uneven_depths",
    "gpt_no_layers",
    "gpt_sizes",
    "gpt_gqa",
    "gpt_layer_norm",
    "gpt_rms_norm",
    "gpt_gelu",
    "gpt_swiglu",
    "gpt_qk_norm",
    "gpt_bias",
    "gpt_sequence_parallel",
    "gpt_selective_recompute",
    "gpt_full_recompute",
)
_IGNORED = -100


class Replicated(ParallelStyle):
    """A module whose parameters, input and output all ranks have whole: as DTensors inside, and local outside."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

        def leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


class GPT(nn.Module):
    """ids [B, S] -> logits [S, B, V], which are a DTensor where they are cut over tp."""

    def __init__(self, case: GptCase) -> None:
        super().__init__()
        self.case, self.layer = case, layer_of(case)
        dtype = case.format.torch_dtype
        self.embedding = nn.Embedding(case.vocabulary, case.hidden, dtype=dtype)
        learned = case.positions == "learned"
        self.positions = nn.Embedding(case.length, case.hidden, dtype=dtype) if learned else None
        self.layers = nn.ModuleList(Layer(self.layer) for _ in range(case.layers))
        self.norm = new_norm(self.layer, case.hidden)
        self.output = nn.Linear(case.hidden, case.vocabulary, bias=False, dtype=dtype)
        self.own = slice(None)  # of the tokens, those of this rank outside of attention and mlp

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        (mask,) = masks(replace(self.layer, leading=((ids.shape[1], ids.shape[0]),)))
        x = self.embedding(ids.T)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1])[self.own])[:, None]
        for layer in self.layers:
            x = layer(x, mask)
        made: torch.Tensor = self.output(self.norm(x))
        return made


def layer_of(case: GptCase) -> TransformerCase:
    kind = case.recompute
    assert kind != "stage"
    return replace(case.layer(1), recompute=kind)


def parallel_gpt(case: GptCase, mesh: DeviceMesh) -> GPT:
    """The model of the case, cut over the axes tp and dp of the mesh, with gradients that are summed over dp."""
    with torch.random.fork_rng(devices=[]):
        model = GPT(case)
    tp, data = mesh["tp"], mesh["dp"]
    if tp.size() > 1:
        parallelize_module(model, tp, _plan(case))
        if case.sequence_parallel:
            tokens = case.length // tp.size()
            model.own = slice(tp.get_local_rank() * tokens, (tp.get_local_rank() + 1) * tokens)
    if case.tied:
        model.output.weight = model.embedding.weight
    for module in (*model.layers, model):
        one = fully_shard(module, mesh=data)
        assert isinstance(one, FSDPModule)
        # The loss is divided by the tokens of all ranks already, as torchtitan does.
        one.set_gradient_divide_factor(1.0)
        one.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return model


def _plan(case: GptCase) -> dict[str, ParallelStyle]:
    outside = Shard(0) if case.sequence_parallel else Replicate()

    def whole() -> ParallelStyle:
        return SequenceParallel(sequence_dim=0, use_local_output=True) if case.sequence_parallel else Replicated()

    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "norm": whole(),
        "output": ColwiseParallel(input_layouts=outside, output_layouts=Shard(-1), use_local_output=False),
    }
    if case.positions == "learned":
        plan["positions"] = whole()
    for number in range(case.layers):
        styles = plan_of(layer_of(case)) | {"norm1": whole(), "norm2": whole()}
        plan |= {f"layers.{number}.{name}": style for name, style in styles.items()}
    return plan


def named(case: GptCase, model: GPT) -> dict[str, Any]:
    """The parameters by their names in the whole model."""
    found = {"embedding_weight": model.embedding.weight, "output_weight": model.output.weight}
    found |= {f"norm_{kind}": parameter for kind, parameter in model.norm.named_parameters()}
    if model.positions is not None:
        found["positions_weight"] = model.positions.weight
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        of_layer, _ = parameters(model.layer, layer)
        found |= {layer_name(number, name): parameter for name, parameter in of_layer.items()}
    return found


def layouts(case: GptCase, model: GPT) -> dict[str, Layout]:
    """How each is cut: over tp, and of what the rank has of it the first dimension over dp."""
    found: dict[str, Layout] = {"embedding_weight": Split(0, "tp"), "output_weight": Split(0, "tp")}
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        _, of_layer = parameters(model.layer, layer)
        found |= {layer_name(number, name): layout for name, layout in of_layer.items()}
    return {name: (*placements(found.get(name, ())), Split(0, "dp", rule="chunk")) for name in named(case, model)}


class Step:
    """Forward and backward of a rank's batch, in micro-batches, of which the last one's backward reduces gradients."""

    def __init__(self, case: GptCase, model: GPT, mesh: DeviceMesh) -> None:
        self.case, self.model, self.data = case, model, mesh.get_group("dp")

    def __call__(
        self, ids: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor, scale: Any = lambda loss: loss
    ) -> torch.Tensor:
        """The loss of the whole batch. scale: makes of each micro-batch's loss what backward is called on."""
        sizes, model = list(self.case.sizes), self.model
        assert isinstance(model, FSDPModule)
        count = self.count(valid)
        labels = torch.where(valid, targets, _IGNORED)
        total = torch.zeros((), dtype=self.case.loss_format.torch_dtype)
        for m, (own, wanted) in enumerate(zip(torch.split(ids, sizes), torch.split(labels, sizes), strict=True)):
            model.set_requires_gradient_sync(m == len(sizes) - 1)
            logits = model(own)
            with _cut_loss(logits):
                loss = F.cross_entropy(
                    logits.flatten(0, 1), wanted.T.flatten(), reduction="sum", ignore_index=_IGNORED
                ) / count.clamp(min=1)
                scale(loss).backward()
            total += as_local(loss.detach())
        dist.all_reduce(total, group=self.data)
        return total

    def count(self, valid: torch.Tensor) -> torch.Tensor:
        """The tokens that have a loss, of all ranks."""
        found = valid.sum()
        dist.all_reduce(found, group=self.data)
        return found


def _cut_loss(logits: torch.Tensor) -> AbstractContextManager[None]:
    made: AbstractContextManager[None] = loss_parallel() if isinstance(logits, DTensor) else nullcontext()
    return made
