"""shardproof: does sharded training code compute what one process computes?

The public names. Importing this imports neither torch nor Hypothesis: the command starts its ranks first.
"""

import importlib
from typing import TYPE_CHECKING

from harness.candidate import Candidate, NotOffered
from harness.clip import Clipper
from harness.data_parallel import DataParallel
from harness.gpt import Gpt
from harness.loss_scale import LossScaler
from harness.mixed_precision import MixedPrecision
from harness.module import PartOf, Sharded
from harness.pipeline import Pipeline
from harness.schedule import PipelineSchedule
from harness.sharded_optimizer import ShardedOptimizer
from harness.train_step import Trainer
from reference.layout import Each, Partial, Split, Whole
from reference.mesh import Mesh

if TYPE_CHECKING:
    from harness.checking import cases, check
    from harness.groups import device_mesh, new_group
    from harness.verification import verify

__all__ = [
    "Candidate",
    "Clipper",
    "DataParallel",
    "Each",
    "Gpt",
    "LossScaler",
    "Mesh",
    "MixedPrecision",
    "NotOffered",
    "PartOf",
    "Partial",
    "Pipeline",
    "PipelineSchedule",
    "Sharded",
    "ShardedOptimizer",
    "Split",
    "Trainer",
    "Whole",
    "cases",
    "check",
    "device_mesh",
    "new_group",
    "verify",
]


_LATER = {
    "cases": "harness.checking",
    "check": "harness.checking",
    "device_mesh": "harness.groups",
    "new_group": "harness.groups",
    "verify": "harness.verification",
}


def __getattr__(name: str) -> object:
    """What needs torch or Hypothesis is imported when it is first used."""
    if name not in _LATER:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
