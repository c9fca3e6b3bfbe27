"""Draws steps of a mixed-precision optimizer: parameters and where they lie, who overflows when, scales, and data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from hypothesis import strategies as st

from reference.loss_scale import Scaling, Value
from reference.mesh import Mesh
from reference.mixed_precision import (
    AXES,
    DTYPES,
    OF_STATE,
    UNSCALED,
    Invalid,
    MixedPrecisionCase,
    MixedPrecisionRecipes,
)
from reference.mixed_precision_parts import Group, Kind, MixedParameter, Overflow
from reference.recipe import Recipe
from strategies.layers import one_in, what_to_refuse
from strategies.mesh import meshes
from strategies.scope import Scope

#: The optional features of the subject.
FEATURES = {
    "mixed_precision_fp32": "models in fp32, whose parameters are their own masters",
    "mixed_precision_adamw": "AdamW, and not only SGD",
    "mixed_precision_groups": "groups of parameters with a learning rate and a weight decay of their own",
    "mixed_precision_warmup": "a learning rate that rises with the steps that are not skipped",
    "mixed_precision_fp32_beside": "parameters in fp32 beside such in bf16 or fp16",
    "mixed_precision_main_grad": "gradients that come in fp32",
    "mixed_precision_sharded": "masters and state that are cut over the data-parallel ranks",
    "mixed_precision_clip": "clips by the global norm, divides the limit by the norm itself",
    "mixed_precision_clip_eps": "clips by the global norm, and adds 1e-6 to it before it divides",
    "mixed_precision_split": "parameters that are cut over tensor-parallel ranks",
    "mixed_precision_uneven": "parts of different length, some of them empty",
    "mixed_precision_stages": "parameters that are on some stages of a pipeline",
    "mixed_precision_tied": "tied parameters, of which another stage has a copy",
    "mixed_precision_frozen": "parameters that do not train",
    "mixed_precision_missing": "parameters without a gradient, on some ranks or on all, and ranks without any",
    "mixed_precision_dynamic": "a loss scale that moves",
    "mixed_precision_hysteresis": "overflows that the scale bears before it backs off, given again as it grows",
    "mixed_precision_overflow": "steps that are skipped where a gradient overflows, on whichever rank",
    "mixed_precision_reload": "weights that are loaded into the model by themselves",
    "mixed_precision_load": "a state that is saved and loaded",
    "mixed_precision_refuses_dtype": "refuses parameters of other dtypes",
    "mixed_precision_refuses_rate": "refuses negative learning rates",
    "mixed_precision_refuses_state": "refuses a state of another configuration, or one that is cut short",
}

MOST_PARAMETERS, MOST_STEPS = 4, 4
_LR = (1.0, 0.5, 0.25, 0.0, 0.1, 0.01)
_EXACT = ("lattice",) * 8 + ("constant_per_rank", "zeros")
_ROUNDING = ("normal",) * 3 + ("uniform", "cancelling", "lattice")
#: After `MOST_STEPS` overflows of a quarter each they are still at least 1. In fp16 the larger ones overflow.
_INITIAL = (2.0**8, 2.0**10, 2.0**13, 2.0**15)
_FACTORS = ((2.0, 0.5), (2.0, 0.5), (4.0, 0.5), (2.0, 0.25))


@st.composite
def cases(draw: st.DrawFn, scope: Scope) -> MixedPrecisionCase:
    """A case within the scope. The plainest one is a step of plain SGD on one element in fp32."""
    has = scope.has
    axes = [axis for axis in AXES if axis in scope.axes]
    axes = [axis for axis in axes if axis != "pp" or has("mixed_precision_stages")]
    mesh = draw(meshes(tuple(axes), scope.max_world))
    # The low formats twice: masters are theirs.
    low = [dtype for dtype in DTYPES if dtype in scope.dtypes and dtype != "fp32"]
    wide = ["fp32"] * has("mixed_precision_fp32") * ("fp32" in scope.dtypes)
    dtype = draw(st.sampled_from(wide + low + low)) if wide + low else "fp32"
    steps = draw(st.integers(1, MOST_STEPS))
    rounding = one_in(draw, 2)
    adamw = has("mixed_precision_adamw") and rounding and draw(st.booleans())
    groups = draw(_groups(scope, rounding))
    main_grad = dtype != "fp32" and has("mixed_precision_main_grad") and draw(st.booleans())
    clips = [1e-6] * has("mixed_precision_clip_eps") + [0.0] * has("mixed_precision_clip")
    clip = draw(st.sampled_from((0.5, 0.25, 1.0, 4.0, 0.3))) if clips and rounding and draw(st.booleans()) else 0.0
    kinds = _ROUNDING if rounding else _EXACT
    load = _at(draw, steps) if has("mixed_precision_load") else 0
    case = MixedPrecisionCase(
        mesh=mesh,
        parameters=draw(_parameters(scope, mesh, dtype != "fp32" and has("mixed_precision_fp32_beside"))),
        groups=groups,
        dtype=dtype,
        optimizer="adamw" if adamw else "sgd",
        momentum=0.9 if rounding and not adamw and draw(st.booleans()) else 0.0,
        betas=draw(st.sampled_from(((0.9, 0.999), (0.8, 0.95)))) if adamw else (0.9, 0.999),
        adam_eps=draw(st.sampled_from((1e-8, 1e-3))) if adamw else 1e-8,
        warmup=draw(st.sampled_from((0, 0, 2, 4))) if has("mixed_precision_warmup") else 0,
        main_grad=main_grad,
        sharded="dp" in mesh.names and has("mixed_precision_sharded") and draw(st.booleans()),
        clip=clip,
        clip_eps=draw(st.sampled_from(clips)) if clip else 0.0,
        scaling=draw(_scalings(scope)),
        steps=steps,
        reload=_at(draw, steps) if has("mixed_precision_reload") else 0,
        load=load,
        relaunch=load > 0 and draw(st.booleans()),
        rule=scope.uneven,
        recipes=MixedPrecisionRecipes(*(
            Recipe(draw(st.sampled_from(kinds)), draw(st.integers(0, 99))) for _ in range(3)
        )),
    )  # fmt: skip
    if has("mixed_precision_overflow"):
        count = draw(st.sampled_from((0, 0, 1, 1, 1, 2)))
        case = replace(case, overflows=tuple(draw(_overflows(mesh, steps)) for _ in range(count)))
    return replace(case, invalid=what_to_refuse(draw, 4, _of_input(scope, case), _of_state(scope, case)))


def _at(draw: st.DrawFn, steps: int) -> int:
    """Before which step something happens; 0 for never."""
    return draw(st.integers(1, steps - 1)) if steps > 1 and one_in(draw, 3) else 0


def _of_input(scope: Scope, case: MixedPrecisionCase) -> list[Invalid]:
    kinds: list[Invalid] = ["lr_negative"] if scope.has("mixed_precision_refuses_rate") else []
    if scope.has("mixed_precision_refuses_dtype") and _trains_everywhere(case):
        kinds.append("dtype")
    return kinds


def _of_state(scope: Scope, case: MixedPrecisionCase) -> tuple[Invalid, ...]:
    return OF_STATE if scope.has("mixed_precision_refuses_state") and _has_a_part_everywhere(case) else ()


def _trains_everywhere(case: MixedPrecisionCase) -> bool:
    """Whether every stage has a parameter that trains: else its ranks have nothing to refuse."""
    return len({stage for i in case.trained for stage in case.stages(i)}) == case.mesh.axis_size("pp")


def _has_a_part_everywhere(case: MixedPrecisionCase) -> bool:
    """Whether every rank holds elements of the first parameter that trains: else it cannot see that they differ."""
    windows = [case.window(case.trained[0], rank) for rank in range(case.mesh.size)]
    return all(held.stop > held.start for held in windows)


@st.composite
def _groups(draw: st.DrawFn, scope: Scope, rounding: bool) -> tuple[Group, ...]:
    def one() -> Group:
        lr = draw(st.sampled_from(_LR if rounding else _LR[:4]))
        return Group(lr, draw(st.sampled_from((0.0, 0.0, 0.1))) if rounding else 0.0)

    return (one(), one()) if scope.has("mixed_precision_groups") and draw(st.booleans()) else (one(),)


@st.composite
def _scalings(draw: st.DrawFn, scope: Scope) -> Scaling:
    initial = draw(st.sampled_from(_INITIAL))
    if not scope.has("mixed_precision_dynamic") or one_in(draw, 4):
        return draw(st.sampled_from((UNSCALED, Scaling("constant", initial))))
    growth, backoff = draw(st.sampled_from(_FACTORS))
    return Scaling(
        initial=initial,
        growth_factor=growth,
        growth_interval=draw(st.integers(1, 3)),
        backoff_factor=backoff,
        hysteresis=draw(st.sampled_from((1, 1, 2))) if scope.has("mixed_precision_hysteresis") else 1,
        minimum=draw(st.sampled_from((0.0, 0.0, 1.0, initial / 2))) if scope.has("mixed_precision_hysteresis") else 0.0,
    )


@st.composite
def _overflows(draw: st.DrawFn, mesh: Mesh, steps: int) -> Overflow:
    axes = draw(st.sampled_from([mesh.names, *((name,) for name in mesh.names), ()]))
    return Overflow(
        draw(st.integers(0, steps - 1)),
        draw(st.sampled_from(get_args(Value))),
        axes,
        draw(st.integers(0, mesh.axis_size(axes) - 1)) if axes else 0,
        draw(st.integers(0, MOST_PARAMETERS - 1)),
        draw(st.integers(0, 9)),
    )


@st.composite
def _parameters(draw: st.DrawFn, scope: Scope, mesh: Mesh, fp32: bool) -> tuple[MixedParameter, ...]:
    has = scope.has
    kinds: list[Kind] = ["trained"] * 4
    kinds += ["frozen"] if has("mixed_precision_frozen") else []
    kinds += ["some", "none", "first"] if has("mixed_precision_missing") else []
    stages = mesh.axis_size("pp") if has("mixed_precision_stages") else 1

    def one(first: bool) -> MixedParameter:
        split = has("mixed_precision_split") and "tp" in mesh.names and draw(st.booleans())
        cut = mesh.axis_size("tp") if split else 1
        return MixedParameter(
            draw(st.integers(1, 9)) if has("mixed_precision_uneven") else cut * draw(st.integers(1, 3)),
            "trained" if first else draw(st.sampled_from(kinds)),
            split,
            draw(st.integers(0, stages - 1)),
            has("mixed_precision_tied") and stages > 1 and draw(st.booleans()),
            fp32 and one_in(draw, 4),
            draw(st.integers(0, 1)) if has("mixed_precision_groups") else 0,
        )

    made = (one(True), *(one(False) for _ in range(draw(st.integers(0, MOST_PARAMETERS - 1)))))
    if has("mixed_precision_missing") or stages == 1:
        return made
    # No rank is without a parameter.
    return (*made, *(replace(made[0], stage=stage, tied=False) for stage in range(stages)))


def needs(case: MixedPrecisionCase) -> dict[str, bool]:
    """The optional features, and whether a case needs them."""
    kinds = {one.kind for one in case.parameters}
    cut = case.mesh.axis_size
    stages = {stage for i in case.trained for stage in case.stages(i)}
    groups = {(group.lr, group.weight_decay) for group in case.groups}
    moving = case.scaling.kind == "dynamic"
    found: dict[str, Any] = {
        "fp32": case.dtype == "fp32",
        "adamw": case.optimizer == "adamw",
        "groups": len(groups) > 1 or any(one.group for one in case.parameters),
        "warmup": case.warmup,
        "fp32_beside": any(one.fp32 for one in case.parameters),
        "main_grad": case.main_grad,
        "sharded": case.sharded,
        "clip": case.clip and not case.clip_eps,
        "clip_eps": case.clip and case.clip_eps,
        "split": any(one.split for one in case.parameters),
        "uneven": any(one.split and one.size % cut("tp") for one in case.parameters),
        "stages": cut("pp") > 1 or any(one.stage for one in case.parameters),
        "tied": any(one.tied for one in case.parameters),
        "frozen": "frozen" in kinds,
        "missing": kinds & {"some", "none", "first"} or len(stages) < cut("pp"),
        "dynamic": moving,
        "hysteresis": moving and (case.scaling.hysteresis > 1 or case.scaling.minimum),
        "overflow": case.overflows,
        "reload": case.reload,
        "load": case.load,
        "refuses_dtype": case.invalid == "dtype",
        "refuses_rate": case.invalid == "lr_negative",
        "refuses_state": case.invalid in OF_STATE,
    }
    return {f"mixed_precision_{name}": bool(needed) for name, needed in found.items()}


def within(case: MixedPrecisionCase, scope: Scope) -> bool:
    """Whether a case is such as the scope allows."""
    if case.invalid in OF_STATE and not _has_a_part_everywhere(case):
        return False
    if case.invalid == "dtype" and not _trains_everywhere(case):
        return False
    return case.dtype in scope.dtypes and all(scope.has(feature) for feature, needed in needs(case).items() if needed)
