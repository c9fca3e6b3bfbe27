"""The subjects, by name."""

from __future__ import annotations

from collections.abc import Mapping

from harness.errors import WrongUse
from harness.properties.all_reduce import ALL_REDUCE
from harness.properties.base import Property
from harness.properties.clip import CLIP
from harness.properties.collectives import COLLECTIVES
from harness.properties.cross_entropy import CROSS_ENTROPY
from harness.properties.data_parallel import DATA_PARALLEL
from harness.properties.embedding import EMBEDDING
from harness.properties.gpt import GPT
from harness.properties.linear import LINEAR
from harness.properties.loss_scale import LOSS_SCALE
from harness.properties.mesh import MESH
from harness.properties.mixed_precision import MIXED_PRECISION
from harness.properties.pipeline import PIPELINE
from harness.properties.schedule import SCHEDULE
from harness.properties.sharded_optimizer import SHARDED_OPTIMIZER
from harness.properties.train_step import TRAIN_STEP
from harness.properties.transformer import TRANSFORMER

PROPERTIES: Mapping[str, Property] = {
    p.subject: p
    for p in (
        MESH,
        COLLECTIVES,
        ALL_REDUCE,
        LINEAR,
        EMBEDDING,
        CROSS_ENTROPY,
        TRANSFORMER,
        DATA_PARALLEL,
        SHARDED_OPTIMIZER,
        PIPELINE,
        GPT,
        LOSS_SCALE,
        CLIP,
        MIXED_PRECISION,
        TRAIN_STEP,
        SCHEDULE,
    )
}


class UnknownSubject(WrongUse):
    """No such subject; the message names the known ones."""


def property_of(subject: str) -> Property:
    """The property of a subject. Raises UnknownSubject."""
    if subject not in PROPERTIES:
        raise UnknownSubject(f"unknown subject {subject!r}: expected one of {', '.join(PROPERTIES)}")
    return PROPERTIES[subject]
