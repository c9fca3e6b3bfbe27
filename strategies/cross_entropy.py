"""Draws vocabulary-parallel cross entropy: mesh, vocabulary, targets, options and data."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, get_args

from hypothesis import strategies as st

from reference.cross_entropy import (
    CrossEntropyCase,
    CrossEntropyRecipes,
    Ignored,
    Invalid,
    Reduction,
    Smoothing,
)
from reference.cross_entropy_targets import ignores, least_valid
from reference.ids import IDS, Ids
from strategies.layers import BACKWARD, LARGEST, cut_length, leadings, one_in, tiny
from strategies.mesh import meshes, smaller_meshes
from strategies.recipe import recipes
from strategies.scope import Scope
from strategies.simpler import Simpler

#: The optional features of the subject.
FEATURES = {
    "cross_entropy_padding": "columns after the vocabulary, which belong to no token",
    "cross_entropy_uneven": "columns that the group size does not divide, also fewer than ranks",
    "cross_entropy_any_strides": "logits whose columns do not lie next to each other in memory",
    "cross_entropy_fp64": "fp64 logits are computed with in fp64",
    "cross_entropy_explicit_group": "the loss is given a process group, along any axis, instead of taking the default",
    "cross_entropy_reduced": "the sum, and the mean over tokens that are not ignored, beside the loss of each token",
    "cross_entropy_ignore_index": "targets that give no loss and no gradient",
    "cross_entropy_none_valid": "the mean over no token at all is 0",
    "cross_entropy_ignores_nonfinite": "ignored tokens give none also where their logits are infinite or NaN",
    "cross_entropy_torch_smoothing": "label smoothing with alpha spread over all classes",
    "cross_entropy_megatron_smoothing": "label smoothing with alpha spread over the other classes",
    "cross_entropy_z_loss": "the squared log of the normaliser is added",
    "cross_entropy_refuses_targets": "targets out of range are refused on every rank alike",
}

_INVALID: list[Invalid] = ["negative", "past"]
_REDUCTIONS: list[Reduction] = ["none", "mean", "mean", "sum"]
_IGNORED: list[Ignored] = ["none", *["some"] * 3, "micro_batch", "replica", "all"]  # type: ignore[list-item]
_ALPHAS, _Z_LOSSES, _SCALES = [0.1, 0.5], [1e-4, 0.1], [1, 1, 1, 1000]
_TINY = 5


@st.composite
def cases(draw: st.DrawFn, scope: Scope) -> CrossEntropyCase:
    """A loss within the scope. The plainest one has one token and one class, on one rank."""
    explicit = scope.has("cross_entropy_explicit_group") and draw(st.booleans())
    axis = draw(st.sampled_from(scope.axes)) if explicit else "tp"
    mesh = draw(meshes(scope.axes, scope.max_world, first=axis))
    n = mesh.axis_size(axis)
    uneven = scope.has("cross_entropy_uneven")
    width = draw(st.integers(1, LARGEST + n)) if uneven else cut_length(draw, n, uneven=False)
    padding = draw(st.integers(0, min(3, width - 1))) if scope.has("cross_entropy_padding") and one_in(draw, 2) else 0
    dims = draw(st.sampled_from([*sorted(scope.token_dims), min(scope.token_dims)]))
    leading = draw(leadings(dims, draw(st.integers(1, LARGEST))))
    dtype = draw(st.one_of([st.just(d) for d in _dtypes(scope)]))
    made = draw(recipes(2, dtype, exact=False))  # nothing here is exact, whatever the data
    refuses = scope.has("cross_entropy_refuses_targets") and one_in(draw, 12)
    options = draw(_options(scope, width - padding))
    case = CrossEntropyCase(
        mesh=mesh,
        vocabulary=width - padding,
        leading=leading,
        axis=axis,
        dtype=dtype,
        padding=padding,
        scale=draw(st.sampled_from(_SCALES)),
        explicit_group=explicit,
        logits_require_grad=not one_in(draw, 8),
        transposed=scope.has("cross_entropy_any_strides") and draw(st.sampled_from([False, True, True])),
        backward=draw(st.sampled_from(BACKWARD)),
        invalid=draw(st.sampled_from(_INVALID)) if refuses else "",
        targets=Ids(draw(st.sampled_from(list(IDS))), draw(st.integers(0, 99))),
        recipes=_decided(CrossEntropyRecipes(*made), options),
        **options,
    )
    return _defined(case, scope)


def _dtypes(scope: Scope) -> list[str]:
    return [d for d in scope.dtypes if d != "fp64" or scope.has("cross_entropy_fp64")]


@st.composite
def _options(draw: st.DrawFn, scope: Scope, vocabulary: int) -> dict[str, Any]:
    """The options of the loss itself."""
    options: dict[str, Any] = {}
    if scope.has("cross_entropy_reduced"):
        options["reduction"] = draw(st.sampled_from(_REDUCTIONS))
    if scope.has("cross_entropy_ignore_index") and one_in(draw, 2):
        options["ignored"] = draw(st.sampled_from(_IGNORED))
        options["ignore_index"] = draw(st.sampled_from([-100, -100, -1, vocabulary - 1]))
    kinds = [kind for kind in get_args(Smoothing) if scope.has(f"cross_entropy_{kind}_smoothing")]
    kinds = [kind for kind in kinds if kind == "torch" or vocabulary > 1]
    if kinds and one_in(draw, 3):
        options["label_smoothing"] = draw(st.sampled_from(_ALPHAS))
        options["smoothing"] = draw(st.sampled_from(kinds))
    if scope.has("cross_entropy_z_loss") and one_in(draw, 5):
        options["z_loss"] = draw(st.sampled_from(_Z_LOSSES))
    return options


def _decided(made: CrossEntropyRecipes, options: dict[str, Any]) -> CrossEntropyRecipes:
    """Without infinities that leave open what comes out, and without many equal losses, whose roundings are equal too,
    which looks like a common factor."""
    logits, loss_grad = made.logits, made.loss_grad
    if logits.kind == "zeros":
        logits = dataclasses.replace(logits, kind="lattice")
    if logits.inject == "-inf" and options.get("label_smoothing"):
        logits = dataclasses.replace(logits, inject="nan")
    if loss_grad.inject is not None:
        loss_grad = dataclasses.replace(loss_grad, inject="nan")
    return CrossEntropyRecipes(logits, loss_grad)


def _defined(case: CrossEntropyCase, scope: Scope) -> CrossEntropyCase:
    """The case where the candidate says what comes out, else a case that is near."""
    if case.reduction == "mean" and not scope.has("cross_entropy_none_valid") and least_valid(case) == 0:
        case = dataclasses.replace(case, reduction="sum")
    if case.recipes.logits.inject and not scope.has("cross_entropy_ignores_nonfinite") and ignores(case):
        finite = dataclasses.replace(case.recipes.logits, inject=None)
        case = dataclasses.replace(case, recipes=dataclasses.replace(case.recipes, logits=finite))
    return case


def simpler(case: CrossEntropyCase, scope: Scope) -> Iterator[CrossEntropyCase]:
    """Simpler cases within the scope: first the smallest meshes and sizes with the same options, all combinations of
    them, then one option or recipe at a time as plain as can be."""
    meshes_ = [*smaller_meshes(case.mesh, keep=case.axis), case.mesh]
    kinds = dict.fromkeys([case.targets, Ids(case.targets.kind), Ids(), Ids("ends")])
    paddings = dict.fromkeys([min(1, case.padding), case.padding])
    sizes = itertools.product(meshes_, range(1, _TINY + 1), tiny(case.leading), paddings, kinds)
    for mesh, vocabulary, leading, padding, targets in sizes:
        changes = {"mesh": mesh, "vocabulary": vocabulary, "leading": leading, "padding": padding, "targets": targets}
        if case.ignore_index >= 0:
            changes["ignore_index"] = min(case.ignore_index, vocabulary - 1)
        yield from _SIMPLER.changed(case, scope, **changes)
    yield from _SIMPLER.plainer(case, scope)


def _measure(case: CrossEntropyCase) -> tuple[Any, ...]:
    """What is simpler has the smaller measure."""
    options, made = len(_SIMPLER.options(case)), len(_SIMPLER.recipes(case))
    tokens = sum(math.prod(dims) for dims in case.leading)
    targets = list(IDS).index(case.targets.kind), case.targets.seed
    sizes = case.width, case.padding, len(case.leading), tokens
    return (case.mesh.size, len(case.mesh.axes), *sizes, options, made, *targets)


def within(case: CrossEntropyCase, scope: Scope) -> bool:
    """Whether the dtype, the sizes, the smoothing and the data of a case are such as the scope allows."""
    even = case.width % case.parallel_size == 0 or scope.has("cross_entropy_uneven")
    smoothing = not case.label_smoothing or scope.has(f"cross_entropy_{case.smoothing}_smoothing")
    return even and smoothing and case.dtype in _dtypes(scope) and _defined(case, scope) == case


_SIMPLER = Simpler(CrossEntropyCase, ("leading", "axis"), _measure, within)
