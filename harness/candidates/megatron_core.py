"""Megatron-Core's layers and process groups, on CPU.

What it asks of a GPU is answered by the CPU (megatron_core_on_cpu.py); nothing of its arithmetic is touched.

Not offered: uneven features (refused by its ``divide``), main_grad (a CUDA kernel of APEX), expert parallelism as an
axis of the default mesh (it has a mesh of its own). Of cross entropy: logits that are not contiguous (it views them),
padding (it has no notion of it) and fp64 (it computes in fp32).
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from harness.candidate import NotOffered
from harness.candidates import (
    megatron_clip,
    megatron_data_parallel,
    megatron_loss_scale,
    megatron_mixed_precision,
    megatron_pipeline,
)
from harness.candidates import megatron_core_transformer as transformer
from harness.candidates import megatron_schedules as schedules
from harness.candidates.known_faults import WithKnownFaults
from harness.candidates.megatron_core_on_cpu import present_cpu_as_the_device
from harness.clip import Clipper
from harness.data_parallel import DataParallel
from harness.loss_scale import LossScaler
from harness.mixed_precision import MixedPrecision
from harness.module import Sharded
from harness.pipeline import Pipeline
from harness.schedule import PipelineSchedule
from harness.stages import StageModule
from reference.clip import ClipCase
from reference.collectives import CollectivesCase
from reference.cross_entropy import CrossEntropyCase, tensors
from reference.data_parallel import DataParallelCase
from reference.embedding import EmbeddingCase
from reference.layout import Partial, Split, Whole
from reference.linear import LinearCase
from reference.linear_traffic import with_input_gradient
from reference.loss_scale import LossScaleCase
from reference.mesh import Mesh
from reference.mixed_precision import MixedPrecisionCase
from reference.pipeline import PipelineCase
from reference.schedule import ScheduleCase
from reference.traffic import Transfer
from reference.transformer import TransformerCase

if importlib.util.find_spec("megatron") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Transformer Engine and APEX, which CPU ranks do without
        from megatron.core import ModelParallelConfig, parallel_state
        from megatron.core.tensor_parallel import (
            ColumnParallelLinear,
            RowParallelLinear,
            VocabParallelEmbedding,
            mappings,
            vocab_parallel_cross_entropy,
        )

_GROUPS = {
    ("tp",): "get_tensor_model_parallel_group",
    ("cp",): "get_context_parallel_group",
    ("pp",): "get_pipeline_model_parallel_group",
    ("dp",): "get_data_parallel_group",
    ("tp", "pp"): "get_model_parallel_group",
    ("tp", "cp"): "get_tensor_and_context_parallel_group",
    ("tp", "dp"): "get_tensor_and_data_parallel_group",
    ("embedding",): "get_embedding_group",
    ("position-embedding",): "get_position_embedding_group",
}


class MegatronCore(WithKnownFaults):
    """megatron.core's tensor_parallel, parallel_state and transformer."""

    name: ClassVar[str] = "megatron-core"
    requires: ClassVar[tuple[str, ...]] = ("megatron-core",)
    axes = ("tp", "cp", "dp", "pp")
    supports = (
        "gather_output",
        "input_not_parallel",
        "skip_bias_add",
        "sequence_parallel",
        "explicit_group",
        "column_weight_at_call",
        "collectives_any_axis",
        "embedding_sequence_parallel",
        "cross_entropy_megatron_smoothing",
        *transformer.FEATURES,
        *megatron_data_parallel.FEATURES,
        *schedules.FEATURES,
        *megatron_pipeline.FEATURES,
        *megatron_loss_scale.LOSS_SCALE_FEATURES,
        *megatron_mixed_precision.MIXED_PRECISION_FEATURES,
        *megatron_clip.CLIP_FEATURES,
    )
    initialization = "full"
    token_dims = (2,)  # [sequence, batch, hidden], says its documentation
    largest_mesh = 2048  # it enumerates ranks one by one in Python
    meshes_at_once = 1  # its groups are module globals

    def open(self, mesh: Mesh) -> None:
        size = mesh.axis_size
        names = list(mesh.names)
        if size("cp") > 1 and size("pp") > 1 and names[-1] != "pp":
            raise NotOffered("initialize_model_parallel wants pp as the slowest axis beside cp")
        present_cpu_as_the_device()
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of its callers' names
        warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=size("tp"),
            pipeline_model_parallel_size=size("pp"),
            context_parallel_size=size("cp"),
            create_gloo_process_groups=False,  # a second set, beside NCCL's
            # Axes of one rank may stand anywhere; it takes the slowest to be pp.
            order="-".join([*(a for a in ("tp", "cp", "ep", "dp", "pp") if a not in names), *names]),
        )

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        if set(axes) == {"dp", "cp"}:
            group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
        elif axes in _GROUPS:
            getter = getattr(parallel_state, _GROUPS[axes])
            group = getter(check_initialized=False) if axes != ("dp",) else getter()
        else:
            group = None
        return group if isinstance(group, dist.ProcessGroup) else None

    def group_ranks(self, mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]] | None:
        if set(axes) - {"tp", "cp", "dp", "pp"}:
            return None
        sizes = {name: mesh.axis_size(name) for name in ("tp", "ep", "dp", "pp", "cp")}
        order = "-".join(mesh.names) or "tp"
        generator = parallel_state.RankGenerator(**sizes, order=order)
        ranks: list[list[int]] = generator.get_ranks("-".join(axes))
        return ranks

    def traffic(self, case: Any, needed: Sequence[Transfer]) -> Sequence[Transfer]:
        if isinstance(case, TransformerCase):
            return transformer.traffic(case, needed)
        if not isinstance(case, LinearCase):
            return needed
        apart = {"bias"} if case.skip_bias_add else set()  # the caller adds it: no gradient comes to the layer
        if case.kind == "column" and "input" not in case.trained and case.trained - apart:
            # A column layer reduces the gradient of its input also where nobody wants it.
            return with_input_gradient(case, needed)
        return needed

    def collective(self, case: CollectivesCase) -> Sharded:
        if case.kind in ("copy", "reduce") and case.parallel_size > 1:
            self.known_fault("a tensor that is reduced is changed in place, or not reduced where it is not contiguous")
        group = self.group((case.axis,))
        functions = {
            "copy": mappings.copy_to_tensor_model_parallel_region,
            "reduce": mappings.reduce_from_tensor_model_parallel_region,
            "scatter": mappings.scatter_to_tensor_model_parallel_region,
            "gather": mappings.gather_from_tensor_model_parallel_region,
            "gather_sequence": mappings.gather_from_sequence_parallel_region,
            "reduce_scatter": mappings.reduce_scatter_to_sequence_parallel_region,
        }
        function: Any = functions[case.kind]
        return Sharded(lambda x: function(x, group=group))

    def column_linear(self, case: LinearCase) -> Sharded:
        if case.bias and not case.skip_bias_add and case.bias_requires_grad and not case.weight_requires_grad:
            self.known_fault("column layer with a frozen weight: the gradient of its bias is dropped")
        if case.bias and case.skip_bias_add and case.gather_output and case.parallel_size > 1:
            self.known_fault("column layer with gather_output and skip_bias_add: returns one rank's part of the bias")
        layer = ColumnParallelLinear(
            case.in_features,
            case.out_features,
            config=self._config(case),
            init_method=torch.nn.init.normal_,
            bias=case.bias,
            gather_output=case.gather_output,
            skip_bias_add=case.skip_bias_add,
            skip_weight_param_allocation=case.weight_at_call,
            tp_group=self._explicit(case),
        )
        split = Split(0, case.axis)
        parameters = {}
        if case.weight_at_call:
            local = case.out_features // case.parallel_size
            parameters["weight"] = torch.nn.Parameter(
                torch.zeros(local, case.in_features, dtype=case.format.torch_dtype)
            )
        weight = parameters.get("weight")
        forward = _as_outputs(case, lambda x: layer(x, weight=weight))
        return Sharded(layer, forward=forward, parameters=parameters, weight=split, bias=split)

    def row_linear(self, case: LinearCase) -> Sharded:
        layer = RowParallelLinear(
            case.in_features,
            case.out_features,
            config=self._config(case),
            init_method=torch.nn.init.normal_,
            bias=case.bias,
            input_is_parallel=case.input_is_parallel,
            skip_bias_add=case.skip_bias_add,
            tp_group=self._explicit(case),
        )
        # Under sequence parallelism its trainer sums the bias gradient over tp later, by design.
        summed_later = {"bias": Partial(case.axis)} if case.sequence_parallel else {}
        forward = _as_outputs(case, layer)
        return Sharded(layer, forward=forward, grads=summed_later, weight=Split(1, case.axis), bias=Whole())

    def embedding(self, case: EmbeddingCase) -> Sharded:
        layer = VocabParallelEmbedding(
            case.rows,
            case.hidden,
            init_method=torch.nn.init.normal_,
            reduce_scatter_embeddings=case.sequence_parallel,
            config=self._config(case),
            tp_group=self._explicit(case),
        )
        # With the reduce-scatter it takes ids as [batch, sequence] and returns [sequence, batch, hidden].
        forward = (lambda ids: layer(ids.transpose(0, 1))) if case.sequence_parallel else None
        return Sharded(layer, forward=forward, weight=Split(0, case.axis))

    def cross_entropy(self, case: CrossEntropyCase) -> Sharded:
        if case.label_smoothing and case.parallel_size > 1:
            self.known_fault("label smoothing: the width and the mean are those of the rank's own logits")
        if case.label_smoothing and _probabilities_underflow(case):
            self.known_fault("label smoothing: the loss is infinite where a probability is too small for fp32")

        def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            # A known fault: fp32 logits are changed in place. On a copy all else can be seen.
            own = logits if self.strict else logits.clone()
            found: torch.Tensor = vocab_parallel_cross_entropy(own, targets, case.label_smoothing)
            return found

        return Sharded(loss)

    def transformer_layer(self, case: TransformerCase) -> Sharded:
        if case.kv_heads < case.parallel_size and case.axis != "tp":
            self.known_fault("attention with fewer key/value heads than ranks: gathers over the default tp group")
        if case.recompute == "full" and case.trains and not case.input_requires_grad:
            self.known_fault("full recomputation with an input that needs no gradient: nothing in the layer trains")
        if case.dropout and case.qk_norm:
            raise NotOffered("recomputation changes the last bits of the gradients of head norms")
        return transformer.transformer_layer(case, self._group(case.axis))

    def dropout_masks(self, case: TransformerCase) -> dict[str, torch.Tensor]:
        return transformer.dropout_masks(case, self._group(case.axis))

    def data_parallel(self, case: DataParallelCase, module: torch.nn.Module) -> DataParallel:
        group, alone = self.group_along(case.axis), self.group_along("ep")
        return megatron_data_parallel.distributed(case, module, group, alone, self.known_fault)

    def pipeline(self, case: PipelineCase, stages: Sequence[StageModule]) -> Pipeline:
        group, alone = self.group_along(case.axis), self.group_along("ep")
        return megatron_pipeline.pipeline(case, stages, group, alone, self.strict)

    def loss_scaler(self, case: LossScaleCase) -> LossScaler:
        return megatron_loss_scale.grad_scaler(case)

    def mixed_precision(self, case: MixedPrecisionCase, parameters: Mapping[str, torch.nn.Parameter]) -> MixedPrecision:
        stage = dist.get_rank(self._group("pp"))
        return megatron_mixed_precision.mixed_precision(case, parameters, self._group("dp"), stage)

    def clip_gradients(self, case: ClipCase, parameters: Mapping[str, torch.nn.Parameter]) -> Clipper:
        group = self.group(("tp", "pp"))
        assert group is not None
        return megatron_clip.clip_grad_norm(case, parameters, group, self.known_fault)

    def schedule(self, case: ScheduleCase) -> PipelineSchedule:
        return schedules.schedule(case)

    def group_along(self, axis: str) -> dist.ProcessGroup:
        """This rank's group along one axis, ``ep`` for the rank alone."""
        if axis == "ep":
            return parallel_state.get_expert_model_parallel_group()  # type: ignore[no-any-return]
        found = self.group((axis,))
        assert found is not None
        return found

    def _config(self, case: LinearCase | EmbeddingCase) -> Any:
        return ModelParallelConfig(
            tensor_model_parallel_size=case.parallel_size,
            sequence_parallel=case.sequence_parallel and case.parallel_size > 1,
            use_cpu_initialization=True,
            params_dtype=case.format.torch_dtype,
        )

    def _group(self, axis: str) -> dist.ProcessGroup:
        group = self.group((axis,))
        assert group is not None
        return group

    def _explicit(self, case: LinearCase | EmbeddingCase) -> dist.ProcessGroup | None:
        return self.group((case.axis,)) if case.explicit_group else None


def _as_outputs(case: LinearCase, layer: Any) -> Any:
    """Its layers always return (output, bias or None); the subject wants the bias only with skip_bias_add."""
    if case.bias and case.skip_bias_add:
        return layer
    return lambda x: layer(x)[0]


def _probabilities_underflow(case: CrossEntropyCase) -> bool:
    """Whether any is below the normal numbers of fp32, where it has few bits left or none."""
    smallest = math.log(torch.finfo(torch.float32).smallest_normal)
    logits = [logits for name, logits in tensors(case).items() if name.startswith("logits")]
    return any(bool((x.log_softmax(-1) < smallest).any()) for x in logits)
