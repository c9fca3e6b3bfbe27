"""Draws steps of a sharded optimizer: parameters, hyper-parameters, who has gradients, saving and loading, and data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from reference.mesh import Mesh
from reference.recipe import Recipe
from reference.sharded_optimizer import (
    OF_STATE,
    Invalid,
    Kind,
    Parameter,
    ReduceDtype,
    ShardedOptimizerCase,
    ShardedOptimizerRecipes,
)
from strategies.layers import one_in, scattered, what_to_refuse
from strategies.mesh import meshes, smaller_meshes
from strategies.scope import Scope
from strategies.simpler import Simpler

#: The optional features of the subject.
FEATURES = {
    "sharded_optimizer_any_axis": "along any axis of the mesh, and not only dp",
    "sharded_optimizer_adamw": "AdamW, and not only SGD",
    "sharded_optimizer_sum": "sums the ranks' gradients instead of averaging them",
    "sharded_optimizer_reduce_dtype": "reduces gradients of bf16 and fp16 parameters in fp32",
    "sharded_optimizer_master": "bf16 and fp16 parameters that are kept and updated in fp32",
    "sharded_optimizer_mixed": "parameters of two dtypes",
    "sharded_optimizer_frozen": "parameters that do not train",
    "sharded_optimizer_missing": "parameters without a gradient, on some ranks or on all",
    "sharded_optimizer_load": "a state that is saved and loaded at the same size",
    "sharded_optimizer_load_other_size": "and at another size",
    "sharded_optimizer_refuses": "refuses, on every rank, parameters that differ between the ranks, or none",
    "sharded_optimizer_refuses_state": "refuses a state of other parameters or of another optimizer",
}

MOST_PARAMETERS, MOST_STEPS = 5, 3
#: Scalars, single elements, tiny ones, some that are larger than an owner's part, or than a buffer of a fixed size.
_SHAPES: tuple[tuple[int, ...], ...] = (
    (1,),
    (),
    (2,),
    (3,),
    (2, 2),
    (5,),
    (1, 1),
    (3, 4),
    (2, 3, 2),
    (17,),
    (70,),
    (9, 40),
)
#: So many equal elements do not lean together beyond what is expected of independent ones.
_FEW = 17
_LR = (1.0, 0.5, 0.25, 0.1, 0.01)
_EXACT = ("lattice",) * 8 + ("constant_per_rank", "zeros")
_ROUNDING = ("normal",) * 3 + ("uniform", "cancelling", "spiky") + ("lattice",)


@st.composite
def cases(draw: st.DrawFn, scope: Scope) -> ShardedOptimizerCase:
    """A case within the scope. The plainest one has one step of plain SGD on one element."""
    own = scope.usual("dp")
    axis = draw(st.sampled_from(scope.axes)) if scope.has("sharded_optimizer_any_axis") and one_in(draw, 3) else own
    mesh = draw(meshes(scope.axes, scope.max_world, first=axis, most=1))
    n = mesh.axis_size(axis)
    dtype = draw(st.sampled_from(scope.dtypes))
    low = dtype in ("bf16", "fp16")
    parameters = draw(_parameters(scope, mixed=scope.has("sharded_optimizer_mixed") and dtype != "fp32"))
    master = low and scope.has("sharded_optimizer_master") and draw(st.booleans())
    # Two cases of three: whole numbers, an update that does not round, as far as the format holds them.
    rounding = draw(st.integers(0, 2)) == 2
    adamw = scope.has("sharded_optimizer_adamw") and (dtype != "fp16" or master) and draw(st.booleans())
    momentum = 0.0 if adamw else draw(st.sampled_from((0.0, 0.0, 0.9, 0.5)))
    steps = draw(st.integers(1, MOST_STEPS))
    load = _load(draw, steps, scope)
    # AdamW in fp16 needs masters, and a state of another optimizer may be its.
    keeps = dtype != "fp16" or master
    invalid = what_to_refuse(draw, 4, _of_input(parameters, n, scope), OF_STATE if keeps and _refuses(scope) else ())
    if invalid in OF_STATE and not load:
        steps, load = max(2, steps), 1
    load_axis = _load_axis(draw, mesh, axis, load, invalid, scope)
    if load_axis is None and not scope.has("sharded_optimizer_load"):
        load = 0  # there is no other size
    wide: list[ReduceDtype] = ["same", "fp32"] if low and scope.has("sharded_optimizer_reduce_dtype") else ["same"]
    kinds = [k for k in (_ROUNDING if rounding else _EXACT) if dtype != "fp16" or k != "spiky"]
    case = ShardedOptimizerCase(
        mesh=mesh,
        parameters=parameters,
        axis=axis,
        dtype=dtype,
        optimizer="adamw" if adamw else "sgd",
        lr=draw(st.sampled_from(_LR if rounding or adamw else _LR[:3])),
        momentum=momentum,
        betas=draw(st.sampled_from(((0.9, 0.999), (0.8, 0.95)))) if adamw else (0.9, 0.999),
        eps=draw(st.sampled_from((1e-8, 1e-3))) if adamw else 1e-8,
        weight_decay=draw(st.sampled_from((0.0, 0.0, 0.1))),
        steps=steps,
        reduction="sum" if scope.has("sharded_optimizer_sum") and draw(st.booleans()) else "average",
        reduce_dtype=draw(st.sampled_from(wide)),
        master=master,
        load=load,
        load_axis=load_axis,
        relaunch=load > 0 and one_in(draw, 3),
        invalid=invalid,
        recipes=ShardedOptimizerRecipes(
            *(Recipe(draw(st.sampled_from(kinds)), draw(st.integers(0, 99))) for _ in range(2))
        ),
    )
    if case.exact or max(one.elements for one in parameters) <= _FEW:
        return case
    recipes = ShardedOptimizerRecipes(scattered(case.recipes.parameter), scattered(case.recipes.gradient))
    return replace(case, recipes=recipes)


def _load(draw: st.DrawFn, steps: int, scope: Scope) -> int:
    loads = scope.has("sharded_optimizer_load") or scope.has("sharded_optimizer_load_other_size")
    return draw(st.integers(1, steps - 1)) if loads and steps > 1 and draw(st.booleans()) else 0


def _load_axis(draw: st.DrawFn, mesh: Mesh, axis: str, load: int, invalid: Invalid | None, scope: Scope) -> str | None:
    others = [name for name in mesh.names if name != axis]
    if not load or invalid or not others or not scope.has("sharded_optimizer_load_other_size"):
        return None
    same = scope.has("sharded_optimizer_load")
    return None if same and one_in(draw, 3) else draw(st.sampled_from(others))


def _of_input(parameters: tuple[Parameter, ...], n: int, scope: Scope) -> list[Invalid]:
    if not scope.has("sharded_optimizer_refuses"):
        return []
    kinds: list[Invalid] = ["empty", "number", "shape", "dtype"] if n > 1 else ["empty"]
    told = {(one.shape, one.fp32, one.kind == "frozen") for one in parameters}
    return kinds + (["order"] if n > 1 and len(told) > 1 else [])


def _refuses(scope: Scope) -> bool:
    """Whether states: what is loaded at another size alone is loaded in other ways."""
    return scope.has("sharded_optimizer_refuses_state") and scope.has("sharded_optimizer_load")


@st.composite
def _parameters(draw: st.DrawFn, scope: Scope, mixed: bool) -> tuple[Parameter, ...]:
    kinds: list[Kind] = ["trained", "trained"]
    kinds += ["frozen"] if scope.has("sharded_optimizer_frozen") else []
    kinds += ["some", "none", "first"] if scope.has("sharded_optimizer_missing") else []

    def one(among: list[Kind]) -> Parameter:
        fp32 = mixed and draw(st.booleans())
        return Parameter(draw(st.sampled_from(_SHAPES)), fp32, draw(st.sampled_from(among)))

    return (one(["trained"]), *(one(kinds) for _ in range(draw(st.integers(0, MOST_PARAMETERS - 1)))))


def simpler(case: ShardedOptimizerCase, scope: Scope) -> Iterator[ShardedOptimizerCase]:
    """Simpler cases within the scope: the smallest meshes with few options, then one thing at a time."""
    changed = _SIMPLER.changed
    meshes_ = [*smaller_meshes(case.mesh, keep=case.axis), case.mesh]
    rounding = ShardedOptimizerRecipes(Recipe("normal"), Recipe("normal"))
    for mesh in meshes_:
        yield from changed(case, scope, mesh=mesh)
        # What a format loses, or an optimizer does, may not show in the few whole numbers of a smaller mesh.
        yield from changed(case, scope, mesh=mesh, recipes=rounding)
    options = _SIMPLER.options(case)
    for kept in itertools.chain([()], itertools.combinations(options, 1)):
        plain = {name: value for name, value in options.items() if name not in kept}
        for count in (1, 2):
            yield from changed(case, scope, **plain, parameters=case.parameters[:count])
        yield from changed(case, scope, **plain)
    yield from _SIMPLER.plainer(case, scope)
    if case.load:
        yield from changed(case, scope, load=0, load_axis=None, relaunch=False)
        yield from changed(case, scope, load=1, steps=2)
    yield from changed(case, scope, steps=case.steps - 1)
    many = case.parameters
    for i, one in enumerate(many):
        yield from changed(case, scope, parameters=many[:i] + many[i + 1 :])
        for shape in ((1,), (2,), (3,)):
            plainer: list[dict[str, Any]] = [{"shape": shape}, {"shape": shape, "fp32": one.fp32, "kind": one.kind}]
            for values in plainer:
                yield from changed(case, scope, parameters=(*many[:i], Parameter(**values), *many[i + 1 :]))


def _measure(case: ShardedOptimizerCase) -> tuple[Any, ...]:
    """What is simpler has the smaller measure."""
    shapes = [(one.elements, len(one.shape) != 1, one.fp32, one.kind != "trained") for one in case.parameters]
    elements = sum(one.elements for one in case.parameters)
    options, made = len(_SIMPLER.options(case)), len(_SIMPLER.recipes(case))
    return (
        case.mesh.size,
        len(case.mesh.axes),
        options,
        len(shapes),
        case.steps,
        elements,
        sorted(shapes),
        case.load,
        made,
    )


def within(case: ShardedOptimizerCase, scope: Scope) -> bool:
    """Whether a case is such as the scope allows."""
    kinds = {one.kind for one in case.parameters}
    needs = {
        "sharded_optimizer_adamw": case.optimizer == "adamw",
        "sharded_optimizer_sum": case.reduction == "sum",
        "sharded_optimizer_reduce_dtype": case.reduce_dtype != "same",
        "sharded_optimizer_master": case.master,
        "sharded_optimizer_mixed": any(one.fp32 for one in case.parameters),
        "sharded_optimizer_frozen": "frozen" in kinds,
        "sharded_optimizer_missing": bool(kinds & {"some", "none", "first"}),
        "sharded_optimizer_load": bool(case.load) and case.load_axis is None,
        "sharded_optimizer_load_other_size": case.load_axis is not None,
    }
    return case.dtype in scope.dtypes and all(scope.has(feature) for feature, needed in needs.items() if needed)


_SIMPLER = Simpler(ShardedOptimizerCase, ("parameters", "axis", "steps", "load"), _measure, within)
