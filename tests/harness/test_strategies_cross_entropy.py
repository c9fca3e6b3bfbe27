"""What is drawn of cross entropy: nothing outside the scope, everything inside, and down to the smallest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from random import Random
from typing import Any

import hypothesis
import pytest
import torch
from drawing import sample
from hypothesis import given
from hypothesis import strategies as st

import strategies.cross_entropy
from reference.cross_entropy import CrossEntropyCase, tensors
from reference.cross_entropy_targets import ignores, least_valid
from reference.dtypes import FORMATS
from reference.ids import IDS
from reference.mesh import AXES
from strategies.cross_entropy import FEATURES
from strategies.scope import Scope

FULL = Scope(max_world=8, features=frozenset(FEATURES))
scopes = st.builds(
    Scope,
    max_world=st.integers(1, 16),
    # Only what a candidate that lacks cross_entropy_fp64 can be asked.
    dtypes=st.lists(st.sampled_from(["fp32", "bf16", "fp16"]), min_size=1, unique=True).map(lambda d: ("fp64", *d)),
    axes=st.lists(st.sampled_from(AXES), unique=True).map(lambda axes: ("tp", *(a for a in axes if a != "tp"))),
    features=st.sets(st.sampled_from(list(FEATURES))).map(frozenset),
    token_dims=st.lists(st.integers(1, 4), min_size=1, unique=True).map(tuple),
)


def used(case: CrossEntropyCase) -> dict[str, bool]:
    """The optional features that a case needs."""
    smooth = case.label_smoothing > 0
    return {
        "cross_entropy_padding": case.padding > 0,
        "cross_entropy_uneven": case.width % case.parallel_size != 0,
        "cross_entropy_any_strides": case.transposed,
        "cross_entropy_fp64": case.dtype == "fp64",
        "cross_entropy_explicit_group": case.explicit_group,
        "cross_entropy_reduced": case.reduction != "none",
        "cross_entropy_ignore_index": case.ignored != "none" or case.ignore_index != -100,
        "cross_entropy_none_valid": case.reduction == "mean" and least_valid(case) == 0,
        "cross_entropy_ignores_nonfinite": case.recipes.logits.inject is not None and ignores(case),
        "cross_entropy_torch_smoothing": smooth and case.smoothing == "torch",
        "cross_entropy_megatron_smoothing": smooth and case.smoothing == "megatron",
        "cross_entropy_z_loss": case.z_loss > 0,
        "cross_entropy_refuses_targets": case.invalid != "",
    }


def outside(case: CrossEntropyCase, scope: Scope) -> list[str]:
    """What of a case its scope does not allow."""
    allowed = {
        "max_world": case.mesh.size <= scope.max_world,
        "axes": set(case.mesh.names) <= set(scope.axes),
        "dtypes": case.dtype in scope.dtypes,
        "token_dims": all(len(dims) in scope.token_dims for dims in case.leading),
        **{feature: feature in scope.features or not uses for feature, uses in used(case).items()},
    }
    return [what for what, is_allowed in allowed.items() if not is_allowed]


@given(scopes, st.data())
def test_what_a_scope_does_not_allow_is_never_drawn(scope: Scope, data: st.DataObject) -> None:
    case = data.draw(strategies.cross_entropy.cases(scope))
    assert outside(case, scope) == []
    assert strategies.cross_entropy.within(case, scope)
    for name, tensor in tensors(case).items():
        if name.startswith("logits"):
            held = tensor.to(case.format.torch_dtype).to(torch.float64)
            assert torch.equal(held.nan_to_num(), tensor.nan_to_num()), f"{name} is not representable"


@given(scopes, st.data())
def test_what_is_simpler_is_in_the_scope_too(scope: Scope, data: st.DataObject) -> None:
    case = data.draw(strategies.cross_entropy.cases(scope))
    for simpler in itertools.islice(strategies.cross_entropy.simpler(case, scope), 200):
        assert outside(simpler, scope) == []
        assert simpler.mesh.size <= case.mesh.size
        assert simpler != case


def test_a_dtype_that_cannot_be_asked_leaves_nothing_to_draw() -> None:
    with pytest.raises(hypothesis.errors.Unsatisfiable):
        smallest(strategies.cross_entropy.cases(Scope(dtypes=("fp64",))), lambda c: True)


DRAWN = strategies.cross_entropy.cases(FULL)


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_drawn_alone_and_with_every_dtype(feature: str) -> None:
    with_it = [case for case in sample(DRAWN, 1500) if used(case)[feature] and case.parallel_size > 1]
    assert {case.dtype for case in with_it} == (set(FORMATS) if feature != "cross_entropy_fp64" else {"fp64"})
    implied = {
        "cross_entropy_none_valid": {"cross_entropy_reduced", "cross_entropy_ignore_index"},
        "cross_entropy_ignores_nonfinite": {"cross_entropy_ignore_index"},
    }
    for other in set(FEATURES) - {feature} - implied.get(feature, set()):
        assert any(not used(case)[other] for case in with_it), f"never without {other}"


@pytest.mark.parametrize(
    "wanted",
    [
        lambda c: c.parallel_size > c.width,
        lambda c: c.parallel_size > 1 and c.vocabulary == 1,
        lambda c: c.padding and c.recipes.logits.inject == "nan",
        lambda c: c.scale == 1000 and c.dtype == "fp16",
        lambda c: c.scale == 1000 and c.label_smoothing and c.padding,
        lambda c: c.ignored == "replica" and c.replicas > 1 and c.reduction == "mean",
        lambda c: c.ignored == "micro_batch" and len(c.leading) > 1 and c.reduction == "mean",
        lambda c: c.ignored == "all" and c.reduction == "mean" and c.z_loss,
        lambda c: c.ignored == "none" and c.ignore_index >= 0 and ignores(c),
        lambda c: c.ignored == "some" and c.smoothing == "megatron" and c.label_smoothing,
        lambda c: c.invalid == "past" and c.padding,
        lambda c: c.invalid == "negative" and c.ignore_index == -1,
        lambda c: not c.logits_require_grad and c.backward != "never",
        lambda c: c.backward == "never" and c.logits_require_grad,
        lambda c: c.backward == "reversed" and len(c.leading) > 2,
        lambda c: c.transposed and c.reduction == "none" and c.padding,
        lambda c: c.recipes.logits.kind == "lattice",
        lambda c: c.recipes.logits.kind == "near_overflow",
        lambda c: c.recipes.loss_grad.kind == "zeros",
        lambda c: c.recipes.logits.inject == "-inf" and not c.label_smoothing,
        lambda c: c.recipes.loss_grad.inject == "nan",
        lambda c: sum(size > 1 for _, size in c.mesh.axes) == 3,
        lambda c: c.parallel_size == 1 and c.mesh.size > 1,
        lambda c: c.mesh.size in (5, 7),
    ],
    ids=lambda f: str(f.__code__.co_firstlineno),
)
def test_what_hides_faults_elsewhere_is_drawn(wanted: Callable[[CrossEntropyCase], bool]) -> None:
    assert any(map(wanted, sample(DRAWN, 1500)))


def test_every_axis_position_and_kind_of_target_is_drawn() -> None:
    drawn = sample(DRAWN, 1500)
    assert {c.axis for c in drawn if c.parallel_size > 1} == set(AXES)
    assert {(c.axis, c.mesh.names.index(c.axis)) for c in drawn} >= set(itertools.product(AXES, range(3)))
    assert {len(dims) for c in drawn for dims in c.leading} == set(FULL.token_dims)
    assert {len(c.leading) for c in drawn} == {1, 2, 3}
    assert {c.vocabulary for c in drawn} >= set(range(1, 13))
    assert {c.targets.kind for c in drawn} == set(IDS)
    assert {c.reduction for c in drawn} == {"none", "mean", "sum"}


def smallest(strategy: st.SearchStrategy[Any], wanted: Callable[[Any], bool]) -> Any:
    phases = [hypothesis.Phase.generate, hypothesis.Phase.shrink]
    settings = hypothesis.settings(max_examples=2000, database=None, derandomize=False, phases=phases)
    return hypothesis.find(strategy, wanted, settings=settings, random=Random(0))


def test_the_plainest_case() -> None:
    case = smallest(strategies.cross_entropy.cases(FULL), lambda c: True)
    assert case == CrossEntropyCase(case.mesh, 1, recipes=case.recipes)
    assert case.mesh.axes == (("tp", 1),)
    assert {case.recipes.logits.kind, case.recipes.loss_grad.kind} == {"normal"}


@pytest.mark.parametrize(
    "wanted",
    [
        lambda c: c.parallel_size > 1,
        lambda c: c.parallel_size > 1 and c.label_smoothing and c.smoothing == "megatron",
        lambda c: c.parallel_size > 1 and c.reduction == "mean" and ignores(c),
        lambda c: c.parallel_size > 1 and c.padding and c.dtype == "bf16",
        lambda c: used(c)["cross_entropy_uneven"],
    ],
    ids=lambda f: str(f.__code__.co_firstlineno),
)
def test_shrinking_ends_at_two_ranks_and_few_columns(wanted: Callable[[CrossEntropyCase], bool]) -> None:
    case = smallest(strategies.cross_entropy.cases(FULL), wanted)
    assert case.mesh.axes == (("tp", 2),)
    assert case.width <= 3
    assert math.prod(math.prod(dims) for dims in case.leading) <= 2


@given(strategies.cross_entropy.cases(FULL))
def test_simplifying_ends_at_a_case_that_nothing_is_simpler_than(case: CrossEntropyCase) -> None:
    """Taking the first proposal each time, as long as the loss stays cut and keeps its dtype and smoothing."""

    def still(c: CrossEntropyCase) -> bool:
        kept = (c.dtype, c.label_smoothing, c.smoothing) == (case.dtype, case.label_smoothing, case.smoothing)
        return kept and c.parallel_size >= least

    least, steps = min(2, case.parallel_size), 0
    while (simpler := next(filter(still, strategies.cross_entropy.simpler(case, FULL)), None)) is not None:
        case, steps = simpler, steps + 1
        assert steps < 100
    assert case.mesh.axes == ((case.axis, least),)
    assert case.width <= 2
    assert (case.leading, case.reduction, case.ignored) in [
        ((dims,), "none", "none") for dims in [(1,), (1, 1), (1, 1, 1)]
    ]
