"""Draws gradients to clip: parameters of every kind, norms around the limit, tiny, huge, and not finite ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

from hypothesis import strategies as st

from reference.clip import (
    AXES,
    ClipCase,
    ClipParameter,
    ClipRecipes,
    Invalid,
    Kind,
    Nonfinite,
    NormType,
    Policy,
)
from reference.mesh import Mesh
from reference.recipe import Recipe
from strategies.layers import one_in
from strategies.mesh import meshes, smaller_meshes
from strategies.scope import Scope
from strategies.simpler import Simpler

#: The optional features of the subject.
FEATURES = {
    "clip_plain": "divides the limit by the norm itself; a candidate must have this or the next",
    "clip_eps": "adds 1e-6 to the norm before it divides, as torch does",
    "clip_low": "gradients of bf16 and fp16, with norms that are accumulated in fp32",
    "clip_fp64": "gradients of fp64, with norms that are accumulated in fp64",
    "clip_extreme": "norms whose powers fp32 does not hold",
    "clip_stages": "parameters that are on some stages of a pipeline",
    "clip_tied": "tied parameters, of which another stage has a copy",
    "clip_sharded": "gradients of which each data-parallel rank has a part",
    "clip_mixed_sharding": "beside others that all data-parallel ranks have",
    "clip_uneven": "parts of different length, some of them empty",
    "clip_missing": "parameters without a gradient on some ranks or all, and ranks without any",
    "clip_loss_scale": "divides the gradients by a loss scale first",
    "clip_skip": "leaves gradients as they are, and says so, where the norm is not finite",
    "clip_raise": "raises on every rank where the norm is not finite",
    "clip_refuses": "refuses a limit or a norm type that is not above 0, and unknown policies",
}

MOST_PARAMETERS = 4
_RATIOS = (0.5, 0.25, 1.0, 2.0, 0.3, 0.9)
_EXACT = ("lattice",) * 6 + ("constant_per_rank", "zeros")
_ROUNDING = ("normal",) * 3 + ("uniform", "cancelling", "spiky", "lattice")
#: Exponents of what gradients are multiplied by, by dtype; the later ones are extreme.
_MAGNITUDES = {"fp16": (0, 8, 4), "bf16": (0, 8, -8, 100, -100), "fp32": (0, 8, -8, 100, -100), "fp64": (0, 100, -100)}
_SCALES = (0, 0, 3, 4)


@st.composite
def cases(draw: st.DrawFn, scope: Scope) -> ClipCase:
    """A case within the scope. The plainest one is one element on one rank, clipped to half its size."""
    axes = tuple(axis for axis in AXES if axis in scope.axes and (axis != "pp" or scope.has("clip_stages")))
    mesh = draw(meshes(axes, scope.max_world))
    dtype = draw(st.sampled_from(_dtypes(scope)))
    parameters = draw(_parameters(scope, mesh))
    rounding = one_in(draw, 2)
    # Where ranks count what they must not, a sum shows it, and a maximum does not.
    norm_type: NormType = draw(st.sampled_from(("2", "2", "1", "1", "inf", "inf", "3", "1.5")))
    eps = draw(st.sampled_from([0.0] * scope.has("clip_plain") + [1e-6] * scope.has("clip_eps") or [1e-6]))
    magnitudes = [e for e in _MAGNITUDES[dtype] if abs(e) < 50 or (scope.has("clip_extreme") and not eps)]
    kinds = [k for k in (_ROUNDING if rounding else _EXACT) if dtype != "fp16" or k != "spiky"]
    case = ClipCase(
        mesh,
        parameters,
        dtype,
        norm_type=norm_type,
        ratio=draw(st.sampled_from(_RATIOS)),
        eps=eps,
        scale=draw(st.sampled_from(_SCALES)) if scope.has("clip_loss_scale") else 0,
        magnitude=draw(st.sampled_from(magnitudes)) if one_in(draw, 2) else 0,
        rule=scope.uneven,
        recipes=ClipRecipes(Recipe(draw(st.sampled_from(kinds)), draw(st.integers(0, 99)))),
    )
    return _special(draw, case, scope)


def _special(draw: st.DrawFn, case: ClipCase, scope: Scope) -> ClipCase:
    """Now and then what is not finite, or what must be refused."""
    special = draw(st.integers(0, 9))
    # There are seven of them, and they are cheap.
    if special in (8, 9) and scope.has("clip_refuses"):
        return replace(case, invalid=draw(st.sampled_from(get_args(Invalid))))
    policies: list[Policy] = ["propagate"]
    policies += ["skip"] if scope.has("clip_skip") else []
    policies += ["raise"] if scope.has("clip_raise") else []
    policy = draw(st.sampled_from(policies))
    if special not in (5, 6, 7):
        return replace(case, policy=policy)
    there = [i for i in range(len(case.parameters)) if case.has_gradient(i)]
    return replace(
        case,
        policy=policy,
        nonfinite=draw(st.sampled_from(get_args(Nonfinite))),
        bad=draw(st.sampled_from(there)),
        at=draw(st.integers(0, 9)),
    )


def _dtypes(scope: Scope) -> list[str]:
    low, double = scope.has("clip_low"), scope.has("clip_fp64")
    allowed = [d for d in scope.dtypes if (low or d not in ("bf16", "fp16")) and (double or d != "fp64")]
    return allowed or list(scope.dtypes)  # which the candidate then refuses itself


@st.composite
def _parameters(draw: st.DrawFn, scope: Scope, mesh: Mesh) -> tuple[ClipParameter, ...]:
    kinds: list[Kind] = ["trained"] * 3
    kinds += ["frozen", "none", "some"] if scope.has("clip_missing") else []
    stages = mesh.axis_size("pp") if scope.has("clip_stages") else 1
    all_sharded = scope.has("clip_sharded") and draw(st.booleans())

    def one(first: bool) -> ClipParameter:
        split = "tp" in mesh.names and draw(st.booleans())
        sharded = all_sharded
        if scope.has("clip_sharded") and scope.has("clip_mixed_sharding"):
            sharded = draw(st.booleans())
        sharded = sharded and "dp" in mesh.names
        kind = "trained" if first else draw(st.sampled_from(kinds))
        cut = mesh.axis_size("tp" if split else ()) * mesh.axis_size("dp" if sharded else ())
        size = draw(st.integers(1, 9)) if scope.has("clip_uneven") else cut * draw(st.integers(1, 3))
        return ClipParameter(
            size,
            "trained" if kind == "some" and not (split or sharded) else kind,
            split,
            sharded,
            # Every stage has a parameter, unless ranks may be without: so the first ones go round.
            draw(st.integers(0, stages - 1)),
            scope.has("clip_tied") and stages > 1 and draw(st.booleans()),
        )

    made = (one(True), *(one(False) for _ in range(draw(st.integers(0, MOST_PARAMETERS - 1)))))
    if scope.has("clip_missing") or stages == 1:
        return made
    return (*made, *(replace(made[0], stage=stage, tied=False) for stage in range(stages)))


def simpler(case: ClipCase, scope: Scope) -> Iterator[ClipCase]:
    """Simpler cases within the scope: the smallest meshes with few options, then one thing at a time."""
    changed = _SIMPLER.changed
    many = case.parameters
    for mesh in [*smaller_meshes(case.mesh), case.mesh]:
        for kept in (*((one,) for one in many), *itertools.combinations(many, 2), many):
            yield from changed(case, scope, mesh=mesh, parameters=kept)
    options = _SIMPLER.options(case)
    for kept_options in itertools.chain([()], itertools.combinations(options, 1)):
        plain = {name: value for name, value in options.items() if name not in kept_options}
        yield from changed(case, scope, **plain)
    yield from _SIMPLER.plainer(case, scope)
    for i, one in enumerate(many):
        yield from changed(case, scope, parameters=many[:i] + many[i + 1 :])
        yield from (changed_one for values in _plainer(one) for changed_one in changed(
            case, scope, parameters=(*many[:i], values, *many[i + 1 :])))  # fmt: skip
    for name, value in (("scale", 3), ("magnitude", 8), ("ratio", 1.0), ("ratio", 2.0), ("norm_type", "1")):
        yield from changed(case, scope, **{name: value})


def _plainer(one: ClipParameter) -> Iterator[ClipParameter]:
    changes: list[dict[str, Any]] = [{"size": 1}, {"size": 2}, {"split": False}, {"sharded": False}, {"stage": 0}]
    for change in [*changes, {"tied": False}, {"kind": "trained"}]:
        try:
            yield replace(one, **change)
        except ValueError:
            continue


def _measure(case: ClipCase) -> tuple[Any, ...]:
    """What is simpler has the smaller measure."""
    shapes = [
        (one.size, one.kind != "trained", one.split + one.sharded + one.tied, one.stage) for one in case.parameters
    ]
    elements = sum(one.size for one in case.parameters)
    options, made = _SIMPLER.options(case), len(_SIMPLER.recipes(case))
    numbers = abs(case.scale), abs(case.magnitude), _RATIOS.index(case.ratio) if case.ratio in _RATIOS else 9
    extra = sum(one.split + one.sharded + one.tied + (one.kind != "trained") for one in case.parameters)
    return (
        case.mesh.size, len(case.mesh.axes), len(shapes), len(options), extra, elements, sorted(shapes), numbers, made,
        case.bad, case.at,
    )  # fmt: skip


def within(case: ClipCase, scope: Scope) -> bool:
    """Whether a case is such as the scope allows."""
    some = [one.sharded for one in case.parameters]
    kinds = {one.kind for one in case.parameters}
    cut = case.mesh.axis_size
    even = all(
        one.size % (cut("tp" if one.split else ()) * cut("dp" if one.sharded else ())) == 0 for one in case.parameters
    )
    stages = {stage for i in range(len(case.parameters)) for stage in case.stages(i)[:1]}
    everywhere = len(stages) == cut("pp")
    needs = {
        "clip_plain": case.eps == 0,
        "clip_eps": case.eps != 0,
        "clip_low": case.dtype in ("bf16", "fp16"),
        "clip_fp64": case.dtype == "fp64",
        "clip_extreme": abs(case.magnitude) > 50,
        "clip_stages": cut("pp") > 1 or any(one.stage for one in case.parameters),
        "clip_tied": any(one.tied for one in case.parameters),
        "clip_sharded": any(some),
        "clip_mixed_sharding": len(set(some)) > 1,
        "clip_uneven": not even,
        "clip_missing": kinds != {"trained"} or not everywhere,
        "clip_loss_scale": case.scale != 0,
        "clip_skip": case.policy == "skip",
        "clip_raise": case.policy == "raise",
        "clip_refuses": case.invalid is not None,
    }
    extreme_with_eps = case.eps > 0 and abs(case.magnitude) > 50
    fits = case.dtype != "fp16" or case.magnitude in _MAGNITUDES["fp16"]
    return fits and not extreme_with_eps and all(scope.has(feature) for feature, needed in needs.items() if needed)


_SIMPLER = Simpler(ClipCase, ("parameters",), _measure, within)
