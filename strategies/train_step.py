"""Draws training steps of a GPT: the model and its batches, the optimizer, scales, who overflows when, and loads."""

from __future__ import annotations

from collections.abc import Iterator
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
from strategies.gpt import LEAST_NORMED
from strategies.layers import one_in
from strategies.mesh import smaller_meshes
from strategies.scope import Scope
from strategies.simpler import Simpler

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


def simpler(case: TrainStepCase, scope: Scope) -> Iterator[TrainStepCase]:
    """The smallest meshes with a small model, then plain options, fewer steps, and simpler models."""
    changed = _SIMPLER.changed
    smaller = [(mesh, _small(case.model, mesh)) for mesh in _meshes(case.mesh)]
    for size in range(max((len(models) for _, models in smaller), default=0)):
        for mesh, models in smaller:
            if size >= len(models):
                continue
            fitted = _on(case, models[size])
            yield from changed(case, scope, **fitted)
            if case.overflows and mesh.names:
                step = case.overflows[0].step
                yield from changed(case, scope, **fitted | {"overflows": (Overflow(step, axes=mesh.names),)})
    options = _SIMPLER.options(case)
    yield from changed(case, scope, **options)
    for name in options:
        yield from changed(case, scope, **{other: value for other, value in options.items() if other != name})
    for steps in range(1, case.steps):
        overflows = tuple(one for one in case.overflows if one.step < steps)
        for load in sorted({min(case.load, steps - 1), 0}):
            resume = case.resume if load else "same"
            kept = {"overflows": overflows, "load": load, "resume": resume, "relaunch": case.relaunch and load > 0}
            yield from changed(case, scope, steps=steps, **kept)
    for name, plain in options.items():
        yield from changed(case, scope, **{name: plain})
    yield from changed(case, scope, load=min(1, case.load))
    for scaling in (_SCALED, _MOVING):
        yield from changed(case, scope, scaling=scaling)
    for i, one in enumerate(case.overflows):
        rest = case.overflows[:i], case.overflows[i + 1 :]
        yield from changed(case, scope, overflows=rest[0] + rest[1])
        for milder in _milder(one):
            yield from changed(case, scope, overflows=(*rest[0], milder, *rest[1]))
    for model in strategies.gpt.simpler(case.model, of_model(scope)):
        yield from changed(case, scope, **_on(case, model))


def _meshes(mesh: Mesh) -> Iterator[Mesh]:
    """Smaller ones, from two ranks up, without axes of one rank; then one rank. A trainer has faults of several ranks,
    and each try costs all its steps."""
    found = [one for one in smaller_meshes(mesh) if all(size > 1 for _, size in one.axes)]
    yield from sorted(found, key=lambda one: (one.size == 1, one.size))


def _small(model: GptCase, mesh: Mesh) -> list[GptCase]:
    """Plain and tiny, then tiny, then as it is; fewer where that is none."""
    plain: dict[str, Any] = {"recompute": "none", "positions": "none", "qk_norm": False, "bias": False}
    tiny = [one for one in strategies.gpt.small(model, mesh) if one.get("hidden", LEAST_NORMED) >= LEAST_NORMED][:3]
    model = model if mesh.axis_size("tp") > 1 else replace(model, sequence_parallel=False)
    found = []
    for changes in ({**tiny[0], **plain}, *tiny, {}):
        try:
            found.append(replace(model, mesh=mesh, **changes))
        except ValueError:
            continue
    return found


def _on(case: TrainStepCase, model: GptCase) -> dict[str, Any]:
    mesh, overflows = model.mesh, []
    for one in case.overflows:
        axes = tuple(name for name in one.axes if name in mesh.names)
        overflows.append(replace(one, axes=axes, at=one.at % mesh.axis_size(axes) if axes else 0))
    resume = case.resume if mesh.axis_size("dp") > 1 else "same"
    sharded = case.sharded and mesh.axis_size("dp") > 1
    return {"model": model, "overflows": tuple(overflows), "resume": resume, "sharded": sharded}


def _milder(one: Overflow) -> Iterator[Overflow]:
    yield replace(one, value="inf", parameter=0, element=0)
    lower: list[dict[str, Any]] = [{name: 0} for name in ("step", "at", "parameter", "element")]
    for change in lower:
        yield replace(one, **change)
    if len(one.axes) > 1:
        yield from (replace(one, axes=(axis,), at=min(one.at, 1)) for axis in one.axes)


_SCALED = Scaling("constant", 2.0**8)
#: A scale that one overflow moves, and no good step.
_MOVING = Scaling(initial=2.0**10, growth_interval=3)


def _measure(case: TrainStepCase) -> tuple[Any, ...]:
    """What is simpler has the smaller measure."""
    overflows = [
        (len(one.axes), one.value != "inf", one.step, one.at, one.parameter, one.element) for one in case.overflows
    ]
    scaling = case.scaling != UNSCALED, case.scaling.kind == "dynamic", case.scaling != _MOVING, case.scaling != _SCALED
    size, *model = strategies.gpt.measure(case.model)
    return (size, case.steps, len(_SIMPLER.options(case)), len(overflows), *model, scaling, overflows, case.load)


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


_SIMPLER = Simpler(TrainStepCase, ("steps",), _measure, within)
