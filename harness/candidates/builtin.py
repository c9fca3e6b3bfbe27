"""The implementation that ships with the project, whole or with one planted fault (``builtin+F04``)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import strategies.all_reduce
import strategies.collectives
import strategies.cross_entropy
import strategies.data_parallel
import strategies.embedding
import strategies.linear
import strategies.sharded_optimizer
import strategies.transformer
from harness.candidate import Candidate, NotOffered, Sharded
from harness.data_parallel import DataParallel
from harness.sharded_optimizer import ShardedOptimizer
from reference.all_reduce import AllReduceCase
from reference.attention import visible_keys
from reference.collectives import CollectivesCase
from reference.cross_entropy import CrossEntropyCase
from reference.data_parallel import DataParallelCase, trained
from reference.dtypes import format_of
from reference.embedding import EmbeddingCase
from reference.layout import Layout, Split, Whole
from reference.linear import LinearCase
from reference.mesh import Mesh
from reference.sharded_optimizer import ShardedOptimizerCase
from reference.traffic import Transfer
from reference.transformer import TransformerCase, shapes
from sharded import agreement, all_reduce, buckets, collectives, loss_normalization, sharded_optimizer, updates
from sharded import mesh as sharded_mesh
from sharded.cross_entropy import vocab_parallel_cross_entropy
from sharded.data_parallel import DistributedDataParallel
from sharded.embedding import VocabParallelEmbedding
from sharded.linear import ColumnParallelLinear, RowParallelLinear
from sharded.process_groups import ProcessGroups, set_default
from sharded.random import dropout
from sharded.sequence_parallel import finish_sequence_parallel_gradients
from sharded.transformer import TransformerLayer, finish_gradients


def mutants() -> Iterable[Any]:
    """The planted faults: id, subject, fault, thread."""
    from sharded.mutants import all_mutants

    return all_mutants()


class Builtin(Candidate):
    """sharded/, on any mesh and in every option of the contract."""

    name: ClassVar[str] = "shardproof's own"
    requires: ClassVar[tuple[str, ...]] = ("shardproof",)
    supports = tuple(
        feature
        for subject in (
            strategies.linear,
            strategies.collectives,
            strategies.all_reduce,
            strategies.embedding,
            strategies.cross_entropy,
            strategies.transformer,
            strategies.data_parallel,
            strategies.sharded_optimizer,
        )
        for feature in subject.FEATURES
        if feature != "all_reduce_library"
    )
    initialization = "full"

    def __init__(self, variant: str | None = None) -> None:
        if variant is not None:
            from sharded.mutants import UnknownMutant, apply

            try:
                apply(variant)
            except UnknownMutant as error:
                raise NotOffered(str(error)) from error

    def open(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.groups = ProcessGroups(mesh.axes, combined=())
        self.all_groups: ProcessGroups | None = None

    def activate(self) -> None:
        set_default(self.groups)

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        if self.all_groups is None:  # layers need only those along one axis
            self.all_groups = ProcessGroups(self.mesh.axes)
        if axes == ("embedding",):
            return self.all_groups.group_of_embedding()
        if axes == ("position-embedding",):
            return self.all_groups.group_of_position_embedding()
        return self.all_groups.group(*axes)

    def group_ranks(self, mesh: Mesh, axes: tuple[str, ...]) -> torch.Tensor:
        if axes == ("embedding",):
            return sharded_mesh.embedding_ranks(mesh.axes)
        if axes == ("position-embedding",):
            return sharded_mesh.position_embedding_ranks(mesh.axes)
        return sharded_mesh.group_ranks(mesh.axes, axes)

    def traffic(self, case: Any, needed: Sequence[Transfer]) -> Sequence[Transfer]:
        if isinstance(case, DataParallelCase):
            return _buckets(case, needed)
        return _with_agreement(case, needed) if isinstance(case, AllReduceCase) else needed

    def collective(self, case: CollectivesCase) -> Sharded:
        group, dim = self.groups.group(case.axis), case.dim
        # One call a tensor: an uneven cut cannot be told from the rank's own piece.
        lengths = iter(shape[dim] for shape in case.shapes)
        functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "copy": lambda x: collectives.copy_to_group(x, group),
            "reduce": lambda x: collectives.reduce_from_group(x, group),
            "scatter": lambda x: collectives.scatter_to_group(x, group, dim),
            "gather": lambda x: collectives.gather_from_group(x, group, dim, next(lengths)),
            "gather_sequence": lambda x: collectives.gather_sequence(x, group, dim, next(lengths)),
            "reduce_scatter": lambda x: collectives.reduce_scatter_to_group(x, group, dim),
        }
        return Sharded(functions[case.kind])

    def all_reduce(self, case: AllReduceCase) -> Sharded:
        group, n = self.groups.group(case.axis), len(case.shapes)
        once: dict[str, Any] = {"check": case.check}
        reduced = {**once, "reduction": case.asks, "accumulate_fp32": case.accumulate_fp32}
        options = {**reduced, "algorithm": case.algorithm, "in_place": case.in_place}

        def handles(*tensors: torch.Tensor) -> list[torch.Tensor]:
            begun = [all_reduce.start_all_reduce(x, group, **options) for x in tensors]
            # Every second rank waits for the last one first.
            order = begun[::-1] if group.rank() % 2 else begun
            found = [handle.wait() for handle in order]
            return found[::-1] if group.rank() % 2 else found

        if case.operation == "reduce_scatter":
            return Sharded(lambda *tensors: [all_reduce.reduce_scatter(x, group, **reduced) for x in tensors])
        if case.operation == "all_gather":
            lengths = case.lengths
            return Sharded(
                lambda *tensors: [all_reduce.all_gather(tensors[m], group, lengths[m], **once) for m in range(n)]
            )
        if case.calls == "handles":
            return Sharded(handles)
        return Sharded(lambda *tensors: all_reduce.all_reduce_buckets(tensors, group, **options))

    def column_linear(self, case: LinearCase) -> Sharded:
        layer = ColumnParallelLinear(
            case.in_features,
            case.out_features,
            gather_output=case.gather_output,
            **self._options(case),
        )
        split = Split(0, case.axis)
        # One call a micro-batch: an uneven cut of the sequence cannot be told from the rank's own piece.
        lengths = iter(dims[0] for dims in case.leading)

        def forward(x: torch.Tensor) -> Any:
            length = next(lengths) if case.sequence_parallel else None
            return layer(x, self._weight(case, layer), sequence_length=length)

        return self._sharded(case, layer, forward, weight=split, bias=split)

    def row_linear(self, case: LinearCase) -> Sharded:
        layer = RowParallelLinear(
            case.in_features,
            case.out_features,
            input_is_parallel=case.input_is_parallel,
            **self._options(case),
        )

        def forward(x: torch.Tensor) -> Any:
            return layer(x, self._weight(case, layer))

        return self._sharded(case, layer, forward, weight=Split(1, case.axis), bias=Whole())

    def embedding(self, case: EmbeddingCase) -> Sharded:
        layer = VocabParallelEmbedding(
            case.vocabulary,
            case.hidden,
            divisible_by=case.rows,  # the multiple that gives the case's padding
            padding_idx=case.padding_idx,
            group=self.groups.group(case.axis) if case.explicit_group else None,
            sequence_parallel=case.sequence_parallel,
            main_grad=case.main_grad,
            dtype=case.format.torch_dtype,
            seed=1,
        )
        return Sharded(layer, weight=Split(0, case.axis))

    def cross_entropy(self, case: CrossEntropyCase) -> Sharded:
        return Sharded(
            functools.partial(
                vocab_parallel_cross_entropy,
                group=self.groups.group(case.axis) if case.explicit_group else None,
                vocabulary=case.vocabulary,
                columns=case.width,
                reduction=case.reduction,
                label_smoothing=case.label_smoothing,
                smoothing=case.smoothing,
                ignore_index=case.ignore_index,
                z_loss=case.z_loss,
            )
        )

    def transformer_layer(self, case: TransformerCase) -> Sharded:
        layer = self._transformer(case)
        masks = iter([_mask(case, m) for m in range(len(case.leading))])
        parts = dict[str, Any](norm1=layer.norm1, norm2=layer.norm2)
        parts |= dict(layer.attention.named_children()) | dict(layer.mlp.named_children())
        parameters: dict[str, torch.Tensor] = {}
        cuts: dict[str, Any] = {}
        for name in shapes(case):
            part, _, kind = name.rpartition("_")
            parameters[name], cuts[name] = getattr(parts[part], kind), _transformer_cut(case, part, kind)
        return Sharded(
            layer,
            forward=lambda x: layer(x, mask=next(masks)),
            parameters=parameters,
            finish=lambda: finish_gradients(layer),
            **cuts,
        )

    def dropout_masks(self, case: TransformerCase) -> dict[str, torch.Tensor]:
        layer, ones = self._transformer(case), torch.ones(1024, dtype=case.format.torch_dtype)
        residual = layer._dropped(ones)
        if case.sequence_parallel:
            return {"sharded": residual}
        return {"replicated": residual, "sharded": dropout(ones, case.dropout, layer.tracker, "sharded")}

    def data_parallel(self, case: DataParallelCase, module: torch.nn.Module) -> DataParallel:
        group = self.groups.group(case.axis)
        wrapped = DistributedDataParallel(
            module,
            group,
            bucket_elements=case.bucket,
            reduction=case.reduction,
            reduce_dtype=None if case.reduce_dtype == "same" else format_of(case.reduce_dtype).torch_dtype,
            gradient_as_view=case.views,
            overlap=case.overlap,
            main_grad=case.main_grad,
        )
        scale = group.size() if case.reduction == "average" else 1
        shares: list[torch.Tensor] = []

        def loss(token_losses: torch.Tensor, valid: Sequence[torch.Tensor], m: int) -> torch.Tensor:
            if m == 0:  # of the step
                shares.clear()
                self.divisor = loss_normalization.divisor(valid, case.loss, group)
            shares.append(loss_normalization.share(token_losses, valid[m], case.loss, self.divisor))
            return shares[-1] * scale

        def report() -> torch.Tensor:
            return loss_normalization.over_ranks(torch.stack(shares).sum().detach(), group)

        return DataParallel(
            wrapped, no_sync=wrapped.no_sync, finish=wrapped.finish, loss=loss, report=report, close=wrapped.close
        )

    def sharded_optimizer(
        self, case: ShardedOptimizerCase, parameters: Mapping[str, torch.nn.Parameter]
    ) -> ShardedOptimizer:
        if case.optimizer == "adamw":
            rule: updates.Rule = updates.AdamW(case.lr, case.betas, case.eps, case.weight_decay)
        else:
            rule = updates.SGD(case.lr, case.momentum, case.weight_decay)
        made = sharded_optimizer.ShardedOptimizer(
            parameters.items(),
            self.groups.group(case.axis),
            rule,
            reduction=case.reduction,
            reduce_dtype=None if case.reduce_dtype == "same" else format_of(case.reduce_dtype).torch_dtype,
            master_weights=case.master,
        )
        return ShardedOptimizer(
            made.step,
            owned=lambda name: [made.owned()[name]],
            state=lambda name, kind: made.state()[name][kind],
            save=made.save,
            load=made.load,
        )

    def _transformer(self, case: TransformerCase) -> TransformerLayer:
        return TransformerLayer(
            case.hidden,
            case.heads,
            case.ffn,
            kv_heads=case.kv_heads,
            norm=case.norm,
            activation=case.activation,
            qk_norm=case.qk_norm,
            rotary=case.rotary,
            recompute=case.recompute,
            attention_dropout=case.dropout,
            hidden_dropout=case.dropout,
            seed=case.seed,
            bias=case.bias,
            sequence_parallel=case.sequence_parallel,
            group=self.groups.group(case.axis) if case.explicit_group else None,
            main_grad=case.main_grad,
            dtype=case.format.torch_dtype,
        )

    def _options(self, case: LinearCase) -> dict[str, Any]:
        return {
            "bias": case.bias,
            "group": self.groups.group(case.axis) if case.explicit_group else None,
            "sequence_parallel": case.sequence_parallel,
            "skip_bias_add": case.skip_bias_add,
            "main_grad": case.main_grad,
            "dtype": case.format.torch_dtype,
            "seed": 1,
        }

    @staticmethod
    def _weight(case: LinearCase, layer: Any) -> torch.Tensor | None:
        """The layer's own weight stands in for one that another layer shares."""
        return layer.weight if case.weight_at_call else None

    def _sharded(self, case: LinearCase, layer: Any, forward: Callable[..., Any], **layouts: Any) -> Sharded:
        group = self.groups.group(case.axis)

        def finish() -> None:
            finish_sequence_parallel_gradients(layer.parameters(), group)

        return Sharded(layer, forward=forward, finish=finish, **layouts)


def _mask(case: TransformerCase, m: int) -> Any:
    """What the layer takes as the mask of a micro-batch."""
    tokens, sequences = case.leading[m]
    return {"causal": "causal", "none": None}.get(case.mask, visible_keys(tokens, sequences, m))


def _transformer_cut(case: TransformerCase, part: str, kind: str) -> Layout:
    if part in ("k", "v"):
        return Split(0, case.axis, copies=case.kv_copies)
    if part in ("q", "gate", "up"):
        return Split(0, case.axis)
    return Split(1, case.axis) if part in ("o", "down") and kind == "weight" else Whole()


def _buckets(case: DataParallelCase, needed: Sequence[Transfer]) -> Sequence[Transfer]:
    """The buckets of the first reduction; after it their order is that of use."""
    if not needed:
        return needed
    sizes = [math.prod(shape) for shape in trained(case).values()]
    planned = buckets.plan(sizes, [torch.float32] * len(sizes), range(len(sizes))[::-1], case.bucket)
    pieces = [replace(needed[0], elements=sum(sizes[index] for index in members)) for members in planned]
    return [*pieces, *needed[1:]]


def _with_agreement(case: AllReduceCase, needed: Sequence[Transfer]) -> Sequence[Transfer]:
    """The ranks agree first: once for all tensors of one call."""
    if not case.check or case.parallel_size == 1:
        return needed
    calls = 1 if case.operation == "all_reduce" and case.calls == "together" else len(case.shapes)
    agree = Transfer("forward", 0, "all_gather", case.axis, agreement.ROW, "int64")
    return [*needed, *[agree] * calls]
