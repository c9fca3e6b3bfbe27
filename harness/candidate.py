"""The plug-in interface: how an implementation under test presents itself.

A candidate *builds*; the harness drives forward and backward, so that every candidate is treated alike. A method that
a candidate does not define is a part that it does not offer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from reference.layout import Rule
from reference.mesh import AXES, Mesh

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike

    from harness.clip import Clipper
    from harness.data_parallel import DataParallel
    from harness.gpt import Gpt
    from harness.loss_scale import LossScaler
    from harness.mixed_precision import MixedPrecision
    from harness.module import Sharded
    from harness.pipeline import Pipeline
    from harness.schedule import PipelineSchedule
    from harness.sharded_optimizer import ShardedOptimizer
    from harness.stages import StageModule
    from harness.train_step import Trainer
    from reference.all_reduce import AllReduceCase
    from reference.clip import ClipCase
    from reference.collectives import CollectivesCase
    from reference.cross_entropy import CrossEntropyCase
    from reference.data_parallel import DataParallelCase
    from reference.embedding import EmbeddingCase
    from reference.gpt import GptCase
    from reference.linear import LinearCase
    from reference.loss_scale import LossScaleCase
    from reference.mixed_precision import MixedPrecisionCase
    from reference.pipeline import PipelineCase
    from reference.schedule import Action, ScheduleCase
    from reference.sharded_optimizer import ShardedOptimizerCase
    from reference.traffic import Transfer
    from reference.train_step import TrainStepCase
    from reference.transformer import TransformerCase


class NotOffered(Exception):
    """Raised by a candidate, on every rank, for a case that it does not claim to support. The case is counted as
    rejected, never as passed."""


class Candidate:
    """An implementation under test. Subclass it and define what you offer.

    One instance serves one mesh. ``builtin+F04`` makes an instance with ``variant="F04"``; a class that has no variants
    need not define ``__init__``.

    name: for the report; by default the class' name.
    requires: the distributions that it needs, for the report and for ``shardproof doctor``.
    dtypes: the formats to draw, of fp32, fp64, bf16, fp16.
    axes: mesh axes that `open` can deal with; others stay at 1.
    supports: optional features, by name; a case that needs another feature is not drawn.
    uneven: how a dimension is cut that the group size does not divide, ``balanced`` or ``chunk``; relevant where
        ``supports`` has "uneven".
    token_dims: how many token dimensions come before the features.
    initialization: ``full`` (concatenated shards equal the one-process initialisation for the same seed),
        ``per_rank`` (shards differ), or None (left to the caller, not checked).
    largest_mesh: the most ranks for which `group_ranks` is fast enough to be called.
    meshes_at_once: how many meshes may be open in one process, each with an instance of its own; ranks that have opened
        so many are replaced by fresh ones.
    """

    name: ClassVar[str] = ""
    requires: ClassVar[Sequence[str]] = ()
    dtypes: Sequence[str] = ("fp32", "fp64", "bf16", "fp16")
    axes: Sequence[str] = AXES
    supports: Iterable[str] = ()
    uneven: Rule = "balanced"
    token_dims: Sequence[int] = (1, 2, 3)
    initialization: Literal["full", "per_rank"] | None = None
    largest_mesh: int = 10**6
    meshes_at_once: int = 8

    def __init__(self, variant: str | None = None) -> None:
        if variant is not None:
            raise NotOffered(f"{type(self).__name__} has no variants, but was asked for +{variant}: leave it out")

    def open(self, mesh: Mesh) -> None:
        """Called on every rank, once per mesh, with the default process group initialised: make the groups."""

    def activate(self) -> None:
        """Called on every rank before a case: make this instance's mesh the current one, if it is a global."""

    def traffic(self, case: Any, needed: Sequence[Transfer]) -> Sequence[Transfer]:
        """The collectives that this candidate does for a case, where they are not those that the algebra needs: a
        correct implementation may choose, and declares it here. More than is declared is reported."""
        return needed

    # What a candidate may offer, declared for the signatures: `offers` asks whether the class overrides them.

    def collective(self, case: CollectivesCase) -> Sharded:
        """Subject collectives: a differentiable collective: ``Sharded(function)`` of one tensor."""
        raise NotImplementedError

    def all_reduce(self, case: AllReduceCase) -> Sharded:
        """Subject all_reduce: ``Sharded(function)`` of the case's tensors, one argument each, which returns as many
        results."""
        raise NotImplementedError

    def column_linear(self, case: LinearCase) -> Sharded:
        """Subject linear: a layer whose weight [out, in] is cut along its output features."""
        raise NotImplementedError

    def row_linear(self, case: LinearCase) -> Sharded:
        """Subject linear: a layer whose weight [out, in] is cut along its input features."""
        raise NotImplementedError

    def embedding(self, case: EmbeddingCase) -> Sharded:
        """Subject embedding: a table [rows, hidden] that is cut along its rows."""
        raise NotImplementedError

    def cross_entropy(self, case: CrossEntropyCase) -> Sharded:
        """Subject cross_entropy: the loss of logits [..., width] that are cut along their columns, and whole targets.
        ``Sharded(function)``: it has no parameters."""
        raise NotImplementedError

    def transformer_layer(self, case: TransformerCase) -> Sharded:
        """Subject transformer: a layer whose heads and ffn are cut. Its parameters are named as in
        `reference.transformer.shapes`; forward is called with the input alone, once for each micro-batch in turn."""
        raise NotImplementedError

    def dropout_masks(self, case: TransformerCase) -> Mapping[str, torch.Tensor]:
        """Subject transformer, cases with dropout: what this rank's dropout makes of at least 128 ones in "replicated"
        regions, whose activations all ranks along the layer's axis hold, and in "sharded" ones."""
        raise NotImplementedError

    def data_parallel(self, case: DataParallelCase, module: torch.nn.Module) -> DataParallel:
        """Subject data_parallel: wraps a module that is alike on all ranks along ``case.axis``. The harness made it,
        and drives forward, the loss and backward: ``DataParallel(wrapped)``."""
        raise NotImplementedError

    def pipeline(self, case: PipelineCase, stages: Sequence[StageModule]) -> Pipeline:
        """Subject pipeline: runs the stages of this rank along ``case.axis``, one for each chunk, in micro-batches of
        ``case.sizes`` samples: ``Pipeline(step)``. The harness made the stages; see `harness.stages.StageModule` for
        what they are called with and say of themselves."""
        raise NotImplementedError

    def gpt(self, case: GptCase) -> Gpt:
        """Subject gpt: this rank's part of a GPT over the axes tp, pp and dp, and a whole step of it:
        ``Gpt(step, parameters, layouts)``."""
        raise NotImplementedError

    def sharded_optimizer(
        self, case: ShardedOptimizerCase, parameters: Mapping[str, torch.nn.Parameter]
    ) -> ShardedOptimizer:
        """Subject sharded_optimizer: an optimizer of the parameters, which are alike on all ranks along ``case.axis``,
        with its state sharded over them: ``ShardedOptimizer(optimizer.step)``. Called again where a state is loaded,
        maybe with another axis."""
        raise NotImplementedError

    def loss_scaler(self, case: LossScaleCase) -> LossScaler:
        """Subject loss_scale: a loss scaler as ``case.asked`` says, which agrees over all axes of the mesh where
        ``case.agree``: ``LossScaler(scale, update)``. Called again where a state is loaded into a fresh one."""
        raise NotImplementedError

    def clip_gradients(self, case: ClipCase, parameters: Mapping[str, torch.nn.Parameter]) -> Clipper:
        """Subject clip: clips the gradients of the parameters that this rank holds, ``parameter{i}``, each the flat
        elements that are this rank's; ``case.parameters[i]`` says how they lie on the others: ``Clipper(clip)``."""
        raise NotImplementedError

    def mixed_precision(self, case: MixedPrecisionCase, parameters: Mapping[str, torch.nn.Parameter]) -> MixedPrecision:
        """Subject mixed_precision: an optimizer of the parameters that this rank holds, ``parameter{i}``, each the flat
        elements that are this rank's; ``case.parameters[i]`` says how they lie on the others. It keeps masters and
        state in fp32, and a loss scale: ``MixedPrecision(step, scale)``. Called again where a state is loaded."""
        raise NotImplementedError

    def train_step(self, case: TrainStepCase) -> Trainer:
        """Subject train_step: this rank's part of a GPT over the axes tp, pp and dp, and whole training steps of it:
        ``Trainer(step, parameters, layouts, scale, skipped)``. Called again where a state is loaded, maybe for a mesh
        without dp, of which this instance was opened."""
        raise NotImplementedError

    def schedule(self, case: ScheduleCase) -> PipelineSchedule | Sequence[Sequence[Action]] | None:
        """Subject schedule: what each rank of a pipeline does, in order, one list of actions a rank; None where the
        candidate has no such schedule. It is asked once for all ranks, without a mesh: nothing is to be run."""
        raise NotImplementedError

    def group(self, axes: tuple[str, ...]) -> torch.distributed.ProcessGroup | None:
        """Subject mesh: this rank's process group along one axis or combined axes of the mesh that was opened last;
        None where the candidate has no such group."""
        raise NotImplementedError

    def group_ranks(self, mesh: Mesh, axes: tuple[str, ...]) -> ArrayLike | None:
        """Subject mesh: all groups along the axes, [groups, group size], by arithmetic alone, for a mesh of up to 10^6
        ranks; None where the candidate does not compute it."""
        raise NotImplementedError

    def offers(self, method: str) -> bool:
        """Whether the class defines the method."""
        return getattr(type(self), method, None) is not getattr(Candidate, method, None)
