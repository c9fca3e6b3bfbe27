"""The case of `shardproof train`: a small GPT on text, and how it learns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

import strategies.gpt
import strategies.train_step
from harness.candidate import NotOffered
from harness.errors import WrongUse
from reference.gpt import MODEL_AXES, GptCase, Positions, Schedule
from reference.ids import TEXT, Ids
from reference.layout import cut
from reference.loss_scale import Scaling
from reference.mesh import Mesh
from reference.mixed_precision import DTYPES, UNSCALED
from reference.train_step import TrainStepCase
from reference.transformer import Activation, Norm

#: Of the text, which is read byte by byte.
_VOCABULARY = 256

#: So large that the first steps of fp16 are skipped, and so few good steps until it grows that it does so in 200.
_MOVING = Scaling(initial=2.0**24, growth_interval=25, minimum=1.0)

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Sizes:
    """layers: of the whole model. batch: sequences of a step, of all data-parallel ranks, of ``length`` tokens.
    micro_batches: into which each of these ranks cuts its own."""

    steps: int = 200
    layers: int = 4
    hidden: int = 32
    heads: int = 4
    length: int = 32
    batch: int = 8
    micro_batches: int = 2
    lr: float = 2.0**-9
    warmup: int = 20

    def __post_init__(self) -> None:
        for name in ("steps", "layers", "hidden", "heads", "length", "batch", "micro_batches"):
            if getattr(self, name) < 1:
                raise WrongUse(f"--{name.replace('_', '-')} is {getattr(self, name)}: expected at least 1")


def dtypes_of(said: Collection[str]) -> tuple[str, ...]:
    """What was typed, also several with commas between them, each once. Raises WrongUse."""
    found = tuple(dict.fromkeys(part.strip() for one in said for part in one.split(",") if part.strip()))
    for dtype in found:
        if dtype not in DTYPES:
            raise WrongUse(f"--dtype {dtype}: expected some of {', '.join(DTYPES)}")
    if not found:
        raise WrongUse(f"--dtype names none: expected some of {', '.join(DTYPES)}")
    return found


def case_of(mesh: Mesh, dtype: str, sizes: Sizes, seed: int, supports: Collection[str] | None = None) -> TrainStepCase:
    """AdamW as large models are trained with it (Touvron et al., "Llama 2", arXiv 2307.09288, section 2.2: betas 0.9
    and 0.95, eps 1e-5, weight decay 0.1, clipping at 1.0), after a warm-up. supports: what the candidate declares; of
    several ways to build a model it gets one that it has; None for everything.

    Raises WrongUse for sizes that do not fit the mesh, and NotOffered for a candidate that lacks what is needed.
    """
    if supports is None:
        supports = {*strategies.gpt.FEATURES, *strategies.train_step.FEATURES}
    has = supports
    other = [name for name, size in mesh.axes if name not in MODEL_AXES and size > 1]
    if other:
        raise WrongUse(f"--mesh {mesh}: expected sizes of {', '.join(MODEL_AXES)} only, not of {', '.join(other)}")
    pp, dp, tp = (mesh.axis_size(axis) for axis in ("pp", "dp", "tp"))
    if sizes.batch % dp or sizes.batch // dp < sizes.micro_batches:
        raise WrongUse(
            f"--batch {sizes.batch} on dp={dp} in {sizes.micro_batches} micro-batches: expected a multiple of {dp}, "
            f"and at least {dp * sizes.micro_batches}"
        )

    def first(choices: Mapping[str, Choice], last: Choice) -> Choice:
        return next((choice for feature, choice in choices.items() if feature in has), last)

    schedules: dict[str, Schedule] = {"gpt_1f1b": "1f1b", "gpt_gpipe": "gpipe"}
    positions: dict[str, Positions] = {"gpt_learned_positions": "learned", "gpt_rotary": "rotary"}
    norms: dict[str, Norm] = {"gpt_layer_norm": "layer"}
    activations: dict[str, Activation] = {"gpt_gelu": "gelu"}
    try:
        model = GptCase(
            mesh,
            _VOCABULARY,
            sizes.hidden,
            sizes.heads,
            sizes.heads,
            2 * sizes.hidden,
            depths=cut(sizes.layers, pp),
            sizes=cut(sizes.batch // dp, sizes.micro_batches),
            length=sizes.length,
            counts=(sizes.length,),
            schedule=first(schedules, "interleaved"),
            dtype=dtype,
            tied="gpt_tied" in has,
            positions=first(positions, "none"),
            norm=first(norms, "rms"),
            activation=first(activations, "swiglu"),
            bias="gpt_bias" in has,
            sequence_parallel=tp > 1 and "gpt_sequence_parallel" in has,
            ids=Ids(TEXT, seed),
        )
        case = TrainStepCase(
            model,
            sizes.steps,
            "adamw",
            sizes.lr,
            betas=(0.9, 0.95),
            adam_eps=1e-5,
            weight_decay=0.1,
            warmup=sizes.warmup,
            clip=1.0,
            clip_eps=0.0 if "train_step_clip" in has else 1e-6,
            scaling=_MOVING if dtype == "fp16" else UNSCALED,
        )
    except ValueError as error:
        raise WrongUse(f"--mesh {mesh} with these sizes: {error}") from error
    due = {**strategies.gpt.needs(model), **strategies.train_step.needs(case)}
    lacking = [feature for feature, needed in due.items() if needed and feature not in has]
    if lacking:
        raise NotOffered(f"the training needs what the candidate does not support: {', '.join(lacking)}")
    return case
