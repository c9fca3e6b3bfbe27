"""PyTorch's own tensor parallelism: ``parallelize_module`` on plain modules, and DTensor.

Not offered: uneven features (``RowwiseParallel`` and the local outputs of ``ColwiseParallel`` take equal shards for
granted), skip_bias_add, main_grad and a weight passed at call, which a plain linear does not have. Of a transformer
layer: key/value heads that several ranks hold, for which it has no style, and dropout, for which DTensor has no random
streams on CPU.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch._dynamo  # DTensor imports it at first use, for seconds: once, before ranks are forked, instead
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from harness.candidates import torch_collectives as collectives
from harness.candidates import torch_schedules as schedules
from harness.candidates import torch_transformer as transformer
from harness.candidates.known_faults import WithKnownFaults
from harness.candidates.torch_clip import CLIP_FEATURES, clip_grad_norm
from harness.candidates.torch_data_parallel import DDP_FEATURES, distributed
from harness.candidates.torch_loss_scale import LOSS_SCALE_FEATURES, grad_scaler
from harness.candidates.torch_mixed_precision import MIXED_PRECISION_FEATURES
from harness.candidates.torch_mixed_precision import mixed_precision as torch_mixed_precision
from harness.candidates.torch_pipeline import PIPELINE_FEATURES
from harness.candidates.torch_pipeline import pipeline as torch_pipeline
from harness.candidates.torch_sharded_optimizer import ZERO_FEATURES, all_reduces_and_broadcasts, zero_redundancy
from harness.clip import Clipper
from harness.data_parallel import DataParallel
from harness.groups import device_mesh
from harness.loss_scale import LossScaler
from harness.mixed_precision import MixedPrecision
from harness.module import Sharded
from harness.pipeline import Pipeline
from harness.schedule import PipelineSchedule
from harness.sharded_optimizer import ShardedOptimizer
from harness.stages import StageModule
from reference.all_reduce import AllReduceCase
from reference.clip import ClipCase
from reference.collectives import CollectivesCase
from reference.cross_entropy import CrossEntropyCase
from reference.data_parallel import DataParallelCase
from reference.embedding import EmbeddingCase
from reference.layout import Split, Whole, cut
from reference.linear import LinearCase, tensors
from reference.linear_traffic import with_output_gradient
from reference.loss_scale import LossScaleCase
from reference.mesh import Mesh
from reference.mixed_precision import MixedPrecisionCase
from reference.pipeline import PipelineCase
from reference.schedule import ScheduleCase
from reference.sharded_optimizer import ShardedOptimizerCase
from reference.traffic import Transfer
from reference.transformer import TransformerCase

# torch 2.13 deprecates the older names; 2.6 has only those.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchNative(WithKnownFaults):
    """torch.distributed.tensor.parallel."""

    name: ClassVar[str] = "torch"
    requires: ClassVar[tuple[str, ...]] = ("torch",)
    supports = (
        "gather_output",
        "input_not_parallel",
        "sequence_parallel",
        "explicit_group",
        "embedding_sequence_parallel",
        "embedding_padding_idx",
        "embedding_uneven",
        "all_reduce_library",
        "all_reduce_pieces",
        "all_reduce_average",
        "all_reduce_extremes",
        "all_reduce_any_strides",
        "all_reduce_in_place",
        "all_reduce_handles",
        "all_reduce_empty",
        "all_reduce_any_axis",
        "cross_entropy_uneven",
        "cross_entropy_any_strides",
        "cross_entropy_fp64",
        "cross_entropy_explicit_group",
        "cross_entropy_reduced",
        "cross_entropy_ignore_index",
        "cross_entropy_refuses_targets",
        *collectives.FEATURES,
        *transformer.FEATURES,
        *DDP_FEATURES,
        *ZERO_FEATURES,
        *PIPELINE_FEATURES,
        *schedules.FEATURES,
        *LOSS_SCALE_FEATURES,
        *MIXED_PRECISION_FEATURES,
        *CLIP_FEATURES,
    )
    uneven = "chunk"
    initialization = "full"

    def open(self, mesh: Mesh) -> None:
        warnings.filterwarnings("ignore", message="To construct DTensor")  # of torch, about itself
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # about two reductions
        # The default axis is there for layers that name none.
        named = mesh if "tp" in mesh.names else Mesh((("tp", 1), *mesh.axes))
        self.mesh = named
        self.device_mesh = device_mesh(named)

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        present = [name for name in reversed(self.mesh.names) if name in axes]
        if len(present) != len(axes):
            return None  # a DeviceMesh knows the axes that it was given, and no embedding group
        if len(present) == 1:
            return self.device_mesh.get_group(present[0])
        return self.device_mesh[tuple(present)]._flatten().get_group()

    def traffic(self, case: Any, needed: Sequence[Transfer]) -> Sequence[Transfer]:
        if isinstance(case, LinearCase) and case.kind == "row" and case.trained == {"bias"}:
            # DTensor gathers the gradient of the output for the product, also where only the bias trains.
            return with_output_gradient(case, needed)
        return all_reduces_and_broadcasts(case) if isinstance(case, ShardedOptimizerCase) else needed

    def collective(self, case: CollectivesCase) -> Sharded:
        mesh, shapes = self.device_mesh[case.axis], iter(case.shapes)
        return Sharded(lambda x: collectives.redistributed(case, mesh, x, next(shapes)))

    def all_reduce(self, case: AllReduceCase) -> Sharded:
        """torch.distributed's own collectives, which reduce in place, one call a tensor."""
        gaps = case.transposed and any(len(shape) == 1 and shape[0] > 1 for shape in case.shapes)
        if gaps and case.in_place and case.parallel_size > 1:
            self.known_fault("gloo's all-reduce of a view with gaps: it reduces what follows in memory instead")
        group = self.device_mesh.get_group(case.axis)
        op = {"avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(
            case.reduction, dist.ReduceOp.SUM
        )

        def pieces(*tensors: torch.Tensor) -> list[torch.Tensor]:
            made = []
            for x, length in zip(tensors, case.lengths, strict=True):
                flat = x.contiguous().view(-1)
                if case.operation == "all_gather":
                    made.append(flat.new_empty(length))
                    _all_gather(made[-1], flat, group=group)
                else:
                    made.append(flat.new_empty(length // case.parallel_size))
                    _reduce_scatter(made[-1], flat, op=op, group=group)
            return made

        def whole(*tensors: torch.Tensor) -> list[torch.Tensor]:
            made = list(tensors) if case.in_place else [x.clone() for x in tensors]
            if case.calls == "handles":
                for work in [dist.all_reduce(x, op=op, group=group, async_op=True) for x in made][::-1]:
                    work.wait()
            else:
                for x in made:
                    dist.all_reduce(x, op=op, group=group)
            return made

        return Sharded(whole if case.operation == "all_reduce" else pieces)

    def schedule(self, case: ScheduleCase) -> PipelineSchedule:
        if case.kind == "1f1b":
            self.known_fault("pipeline_order of Schedule1F1B: the last rank counts its forwards from 1")
        return schedules.schedule(case)

    def column_linear(self, case: LinearCase) -> Sharded:
        if case.out_features == 1 and case.bias and case.bias_requires_grad:  # so on one rank: features are even
            self.known_fault("column layer of one feature with a bias, on one rank: backward raises in DTensor's view")
        style = ColwiseParallel(
            input_layouts=Shard(0) if case.sequence_parallel else Replicate(),
            output_layouts=Replicate() if case.gather_output else Shard(-1),
        )
        linear = parallelize_module(_linear(case), self.device_mesh[case.axis], style)
        split = Split(0, case.axis, rule="chunk")
        return Sharded(linear, weight=split, bias=split, read_grad=_gradient)

    def row_linear(self, case: LinearCase) -> Sharded:
        if case.in_features == 1 and any(len(dims) > 1 and dims[-1] == 1 for dims in case.leading):
            self.known_fault("row layer of one feature, on one rank: forward raises in DTensor's view")
        # Among data that rounds anyway it shows where a sum does not: below the normal range.
        subnormal = case.parallel_size > 1 and case.recipes.bias.kind == "subnormal"
        if case.bias and (subnormal or (case.exact and not _bias_share_is_exact(case))):
            self.known_fault("row layer with a bias: each rank adds bias / tp before the sum, and that is rounded")
        style = RowwiseParallel(
            input_layouts=Shard(-1) if case.input_is_parallel else Replicate(),
            output_layouts=Shard(0) if case.sequence_parallel else Replicate(),
        )
        linear = parallelize_module(_linear(case), self.device_mesh[case.axis], style)
        return Sharded(linear, weight=Split(1, case.axis, rule="chunk"), bias=Whole(), read_grad=_gradient)

    def embedding(self, case: EmbeddingCase) -> Sharded:
        if 0 in cut(case.rows, case.parallel_size, "chunk"):
            self.known_fault("embedding with fewer chunks of rows than ranks: a rank without rows raises in forward")
        style = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(0) if case.sequence_parallel else Replicate()
        )
        table = nn.Embedding(case.rows, case.hidden, padding_idx=case.padding_idx, dtype=case.format.torch_dtype)
        made = parallelize_module(table, self.device_mesh[case.axis], style)
        return Sharded(made, weight=Split(0, case.axis, rule="chunk"), read_grad=_gradient)

    def cross_entropy(self, case: CrossEntropyCase) -> Sharded:
        if case.invalid:
            self.known_fault("loss_parallel with a target out of range: its loss is 0, and nothing is raised")
        if 0 in cut(case.width, case.parallel_size, "chunk"):
            self.known_fault("loss_parallel with fewer chunks of columns than ranks: a rank without columns raises")
        _loss_parallel_for_good()
        mesh = self.device_mesh[case.axis]

        def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            flat = logits.reshape(-1, logits.shape[-1])
            shape = torch.Size((targets.numel(), case.width))
            whole = DTensor.from_local(flat, mesh, [Shard(-1)], run_check=False, shape=shape, stride=(case.width, 1))
            # As torchtitan does: loss_parallel itself computes in the dtype of the logits.
            wide = whole if case.dtype == "fp64" else whole.float()
            found = F.cross_entropy(wide, targets.reshape(-1), reduction=case.reduction, ignore_index=case.ignore_index)
            assert isinstance(found, DTensor)
            return found.to_local().reshape(targets.shape if case.reduction == "none" else ())

        return Sharded(loss)

    def transformer_layer(self, case: TransformerCase) -> Sharded:
        if case.parallel_size == 1:
            one_by_one = case.ffn == 1 and any(sequences == 1 for _, sequences in case.leading)
            if one_by_one or (case.bias and 1 in (case.ffn, case.kv_heads * case.head_size)):
                self.known_fault("a layer of one feature, on one rank: raises in DTensor's view")
        layer = transformer.parallel_layer(case, self.device_mesh[case.axis])
        parameters, layouts = transformer.parameters(case, layer)
        masks = iter(transformer.masks(case))
        return Sharded(
            layer, forward=lambda x: layer(x, next(masks)), parameters=parameters, read_grad=_gradient, **layouts
        )

    def data_parallel(self, case: DataParallelCase, module: nn.Module) -> DataParallel:
        return distributed(case, module, self.device_mesh.get_group(case.axis))

    def pipeline(self, case: PipelineCase, stages: Sequence[StageModule]) -> Pipeline:
        return torch_pipeline(case, stages, self.device_mesh.get_group(case.axis), self.strict, self.known_fault)

    def sharded_optimizer(self, case: ShardedOptimizerCase, parameters: Mapping[str, nn.Parameter]) -> ShardedOptimizer:
        return zero_redundancy(case, parameters, self.device_mesh.get_group(case.axis))

    def loss_scaler(self, case: LossScaleCase) -> LossScaler:
        return grad_scaler(case, self.known_fault)

    def mixed_precision(self, case: MixedPrecisionCase, parameters: Mapping[str, nn.Parameter]) -> MixedPrecision:
        return torch_mixed_precision(case, parameters, self.device_mesh)

    def clip_gradients(self, case: ClipCase, parameters: Mapping[str, nn.Parameter]) -> Clipper:
        return clip_grad_norm(case, parameters, self.device_mesh, self.known_fault)


@functools.cache
def _loss_parallel_for_good() -> AbstractContextManager[None]:
    """Backward must run under it too, which is the harness' own: so it stays on in this process."""
    context = loss_parallel()
    context.__enter__()
    return context


def _linear(case: LinearCase) -> nn.Linear:
    return nn.Linear(case.in_features, case.out_features, bias=case.bias, dtype=case.format.torch_dtype)


def _bias_share_is_exact(case: LinearCase) -> bool:
    """Whether sums of whole numbers and of bias / tp are exact in the case's dtype, in any order."""
    given, n = tensors(case), case.parallel_size
    if not given["bias"].any():
        return True
    weight, bias = given["weight"].abs(), given["bias"].abs()
    largest = max(float((given[f"input[{m}]"].abs() @ weight.T + bias).max()) for m in range(len(case.leading)))
    return n & (n - 1) == 0 and n * largest <= 2**case.format.precision


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient as an optimizer sees it: partial sums are reduced when they meet the parameter's placement."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
        return grad.redistribute(placements=parameter.placements).to_local()
    return grad
