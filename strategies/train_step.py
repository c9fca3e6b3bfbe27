"""Draws training steps of a GPT: the model and its batches, the optimizer, scales, who overflows when, and loads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from hypothesis import assume
from hypothesis import strategies as st

import strategies.gpt
from reference.gpt import MODEL_AXES, GptCase
from reference.loss_scale import Scaling, Value
from reference.mesh import Mesh
from reference.mixed_precision import DTYPES, UNSCALED
from reference.mixed_precision_parts import Overflow
from reference.train_step import Resume, TrainStepCase
from reference.train_step_expected import Undecided, plan
from strategies.layers import one_in
from strategies.scope import Scope

#: The optional features of the subject, beside those of the model.
FEATURES = {
    "train_step_adamw": "AdamW, and not only SGD",
    "train_step_momentum": "SGD with momentum",
    "train_step_weight_decay": "weight decay",
    "train_step_warmup": "a learning rate that rises with the steps that are not skipped",
    "train_step_clip": "clips by the global norm, divides the limit by the norm itself",
    "train_step_clip_eps": "clips by the global norm, and adds 1e-6 to it before it divides",
    "train_step_sharded": "masters and state that are cut over the data-parallel ranks",
    "train_step_dynamic": "a loss scale that moves",
    "train_step_hysteresis": "a loss scale that bears some overflows, and has a minimum",
    "train_step_overflow": "skips a step where a gradient overflows, on whichever rank",
    "train_step_load": "saves its whole state, and loads it",
    "train_step_resume": "loads a state that another number of data-parallel ranks saved",
}

MOST_STEPS = 4
#: Few enough that errors do not grow from step to step; what is divided by second moments stays smooth where the
#: divisor's epsilon is not far below gradients, which are of the order of 0.1.
_RATES = {"sgd": (2.0**-4, 2.0**-3, 2.0**-6), "adamw": (2.0**-5, 2.0**-7)}
_ADAM_EPS = {"fp32": (2.0**-3, 2.0**-7, 2.0**-10), "bf16": (2.0**-3, 2.0**-5), "fp16": (2.0**-3, 2.0**-5)}
_SCALES = (2.0**8, 2.0**6, 2.0**10)
#: With which every gradient overflows in fp16, and the factor between it and those with which none does.
_HUGE, _LEAP = 2.0**32, 2.0**24


@st.composite
def cases(draw: st.DrawFn, scope: Scope) -> TrainStepCase:
    """A case within the scope. The plainest one is a step of plain SGD on one rank in fp32."""
    has = scope.has
    model = draw(strategies.gpt.cases(of_model(scope)))
    steps = draw(st.integers(1, MOST_STEPS))
    adamw: bool = has("train_step_adamw") and draw(st.booleans())
    clips: list[float] = [1e-6] * has("train_step_clip_eps") + [0.0] * has("train_step_clip")
    clip = draw(st.sampled_from((1.0, 0.25, 16.0))) if len(clips) > 0 and not one_in(draw, 3) else 0.0
    load = draw(st.integers(1, steps - 1)) if has("train_step_load") and steps > 1 and one_in(draw, 3) else 0
    model = replace(model, dropout=_dropout(draw, model, load, scope))
    several = "dp" in model.mesh.names and model.data_parallel_size > 1
    others = has("train_step_resume") and several and load and not model.dropout
    resumes: tuple[Resume, ...] = get_args(Resume) if others else ("same",)
    case = TrainStepCase(
        model=model,
        steps=steps,
        optimizer="adamw" if adamw else "sgd",
        lr=draw(st.sampled_from(_RATES["adamw" if adamw else "sgd"])),
        momentum=0.75 if has("train_step_momentum") and not adamw and draw(st.booleans()) else 0.0,
        betas=draw(st.sampled_from(((0.9, 0.999), (0.75, 0.9)))) if adamw else (0.9, 0.999),
        adam_eps=draw(st.sampled_from(_ADAM_EPS[model.dtype])) if adamw else 2.0**-3,
        weight_decay=0.125 if has("train_step_weight_decay") and one_in(draw, 3) else 0.0,
        warmup=draw(st.sampled_from((0, 2, 4))) if has("train_step_warmup") else 0,
        clip=clip,
        clip_eps=draw(st.sampled_from(clips)) if clip else 0.0,
        sharded=has("train_step_sharded") and several and draw(st.booleans()),
        scaling=draw(_scalings(scope, model.dtype)),
        load=load,
        resume=draw(st.sampled_from(resumes)),
        relaunch=load > 0 and draw(st.booleans()),
    )
    if has("train_step_overflow"):
        count = draw(st.sampled_from((0, 0, 0, 1, 2) if clip else (0, 1, 1, 2)))
        case = replace(case, overflows=tuple(draw(_overflows(model.mesh, steps)) for _ in range(count)))
        if count and not one_in(draw, 3):
            # Ranks that do not agree would wait for each other in the norm, and what they do instead would not be seen.
            case = replace(case, clip=0.0, clip_eps=0.0)
    case = case if decided(case) else replace(case, scaling=UNSCALED)
    assume(decided(case))
    return case


def _dropout(draw: st.DrawFn, model: GptCase, load: int, scope: Scope) -> float:
    """More often where a state is loaded, of which random streams are a part."""
    if model.dtype == "fp16":
        return 0.0
    return 0.5 if load and scope.has("gpt_dropout") and one_in(draw, 3) else model.dropout


def decided(case: TrainStepCase) -> bool:
    """Whether rounding does not decide whether a step overflows."""
    try:
        plan(case)
    except Undecided:
        return False
    return True


def of_model(scope: Scope) -> Scope:
    """What models may be drawn."""
    return replace(
        scope,
        axes=tuple(axis for axis in scope.axes if axis in MODEL_AXES),
        dtypes=tuple(dtype for dtype in scope.dtypes if dtype in DTYPES) or ("fp32",),
        features=scope.features - {"gpt_sharded"},
    )


@st.composite
def _scalings(draw: st.DrawFn, scope: Scope, dtype: str) -> Scaling:
    initial = draw(st.sampled_from(_SCALES))
    if not scope.has("train_step_dynamic") or one_in(draw, 3):
        return draw(st.sampled_from((UNSCALED, Scaling("constant", initial))))
    bears = scope.has("train_step_hysteresis")
    made = Scaling(
        initial=initial,
        growth_interval=draw(st.integers(1, 3)),
        hysteresis=draw(st.sampled_from((1, 1, 2))) if bears else 1,
        minimum=draw(st.sampled_from((0.0, 1.0, initial / 2))) if bears else 0.0,
    )
    if dtype == "fp16" and bears and one_in(draw, 3):
        grows = draw(st.booleans())
        return replace(
            made,
            initial=initial if grows else _HUGE,
            growth_factor=_LEAP if grows else 2.0,
            backoff_factor=1 / _LEAP,
            minimum=1.0,
        )
    return made


@st.composite
def _overflows(draw: st.DrawFn, mesh: Mesh, steps: int) -> Overflow:
    axes = draw(st.sampled_from([mesh.names, *((name,) for name in mesh.names), ()]))
    return Overflow(
        draw(st.integers(0, steps - 1)),
        draw(st.sampled_from(get_args(Value))),
        axes,
        draw(st.integers(0, mesh.axis_size(axes) - 1)) if axes else 0,
        draw(st.integers(0, 30)),
        draw(st.integers(0, 99)),
    )


def within(case: TrainStepCase, scope: Scope) -> bool:
    """Whether a case is such as the scope allows."""
    return (
        strategies.gpt.within(case.model, of_model(scope))
        and all(scope.has(feature) for feature, needed in needs(case).items() if needed)
        and decided(case)
    )


def needs(case: TrainStepCase) -> dict[str, bool]:
    """The optional features, beside those of the model, and whether a case needs them."""
    moving = case.scaling.kind == "dynamic"
    found: dict[str, Any] = {
        "adamw": case.optimizer == "adamw",
        "momentum": case.momentum,
        "weight_decay": case.weight_decay,
        "warmup": case.warmup,
        "clip": case.clip and not case.clip_eps,
        "clip_eps": case.clip and case.clip_eps,
        "sharded": case.sharded,
        "dynamic": moving,
        "hysteresis": moving and (case.scaling.hysteresis > 1 or case.scaling.minimum),
        "overflow": case.overflows,
        "load": case.load,
        "resume": case.resume != "same",
    }
    return {f"train_step_{name}": bool(needed) for name, needed in found.items()}
