"""PyTorch's tensor parallelism and FSDP2 on one model: GPT over tp and dp, as torchtitan puts it together, and its
training with ``torch.optim``, ``clip_grad_norm_`` and ``GradScaler`` on DTensors.

Not offered: a pipeline, a vocabulary that the tensor-parallel ranks do not divide, dropout, recomputation of the whole
model, main gradients, an optimizer that is cut otherwise than the parameters. Of training: other dtypes than fp32,
hysteresis, overflows (they are put into gradients before these are reduced, and FSDP reduces them inside backward), and
other ranks that load a state.
"""

from __future__ import annotations

import logging
import warnings
from typing import ClassVar

import torch._dynamo  # noqa: F401 - see torch_native
from torch.distributed.device_mesh import DeviceMesh

from harness.candidate import NotOffered
from harness.candidates.known_faults import WithKnownFaults
from harness.candidates.torch_gpt import GPT_FEATURES, Step, layouts, named, parallel_gpt
from harness.candidates.torch_trainer import TRAINER_FEATURES, TorchTrainer, trainer
from harness.gpt import Gpt
from harness.groups import device_mesh
from harness.train_step import Trainer
from reference.gpt import GptCase
from reference.mesh import Mesh
from reference.train_step import TrainStepCase


class TorchFsdpTp(WithKnownFaults):
    """parallelize_module over tp, and fully_shard over dp."""

    name: ClassVar[str] = "torch-fsdp-tp"
    requires: ClassVar[tuple[str, ...]] = ("torch",)
    dtypes = ("fp32", "fp64")
    axes = ("tp", "dp")
    supports = (*GPT_FEATURES, *TRAINER_FEATURES)

    def open(self, mesh: Mesh) -> None:
        warnings.filterwarnings("ignore", message="To construct DTensor")  # of torch, about itself
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # about two reductions
        missing = tuple((name, 1) for name in self.axes if name not in mesh.names)
        given: DeviceMesh = device_mesh(Mesh((*mesh.axes, *missing)))
        # FSDP names dp first, and torch wants names in the order of the mesh: docs/findings.md.
        self.device_mesh = given if self.strict else _dp_first(given)

    def gpt(self, case: GptCase) -> Gpt:
        self._refuse(case)
        model = parallel_gpt(case, self.device_mesh)
        return Gpt(Step(case, model, self.device_mesh), named(case, model), layouts(case, model))

    def train_step(self, case: TrainStepCase) -> Trainer:
        self._refuse(case.model)
        return trainer(case, TorchTrainer(case, self.device_mesh))

    def _refuse(self, case: GptCase) -> None:
        if case.kv_heads < case.mesh.axis_size("tp"):
            raise NotOffered("key/value heads that several ranks hold: torch has no style for them")


def _dp_first(mesh: DeviceMesh) -> DeviceMesh:
    """The same axes of the same ranks, dp before tp."""
    names = mesh.mesh_dim_names
    assert names is not None
    ranks = mesh.mesh.permute(names.index("dp"), names.index("tp"))
    return DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
