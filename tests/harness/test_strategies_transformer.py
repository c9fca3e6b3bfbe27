"""What is drawn of transformer layers: nothing outside the scope, everything inside, and down to the smallest."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from random import Random

import hypothesis
import pytest
from drawing import sample
from hypothesis import given
from hypothesis import strategies as st

import strategies.transformer
from reference.dtypes import FORMATS
from reference.mesh import AXES, Mesh
from reference.recipe import Recipe
from reference.transformer import TransformerCase, TransformerRecipes
from strategies.scope import Scope
from strategies.transformer import FEATURES, MOST_HIDDEN

FULL = Scope(max_world=8, features=frozenset(FEATURES))
CASES = strategies.transformer.cases(FULL)
Wanted = Callable[[TransformerCase], bool]

scopes = st.builds(
    Scope,
    max_world=st.integers(1, 16),
    dtypes=st.lists(st.sampled_from(list(FORMATS)), min_size=1, unique=True).map(tuple),
    axes=st.lists(st.sampled_from(AXES), unique=True).map(lambda axes: ("tp", *(a for a in axes if a != "tp"))),
    features=st.sets(st.sampled_from(list(FEATURES))).map(frozenset),
)


def used(case: TransformerCase) -> dict[str, bool]:
    """The optional features that a case needs."""
    n = case.parallel_size
    return {
        "transformer_gqa": n <= case.kv_heads < case.heads,
        "transformer_mqa_replicated": case.kv_heads < n,
        "transformer_swiglu": case.activation == "swiglu",
        "transformer_rms_norm": case.norm == "rms",
        "transformer_qk_norm": case.qk_norm,
        "transformer_rotary": case.rotary,
        "transformer_padding_mask": case.mask == "padding",
        "transformer_selective_recompute": case.recompute == "selective",
        "transformer_full_recompute": case.recompute == "full",
        "transformer_dropout": case.dropout > 0,
        "transformer_sequence_parallel": case.sequence_parallel,
        "explicit_group": case.explicit_group,
        "main_grad": case.main_grad,
    }


def outside(case: TransformerCase, scope: Scope) -> list[str]:
    """What of a case its scope does not allow."""
    allowed = {
        "max_world": case.mesh.size <= scope.max_world,
        "axes": set(case.mesh.names) <= set(scope.axes),
        "dtypes": case.dtype in scope.dtypes,
        **{feature: feature in scope.features or not uses for feature, uses in used(case).items()},
    }
    return [what for what, is_allowed in allowed.items() if not is_allowed]


@given(scopes, st.data())
def test_what_a_scope_does_not_allow_is_never_drawn(scope: Scope, data: st.DataObject) -> None:
    case = data.draw(strategies.transformer.cases(scope))
    assert outside(case, scope) == []
    assert strategies.transformer.within(case, scope)
    assert case.hidden <= max(MOST_HIDDEN, 4 * case.heads)
    for simpler in itertools.islice(strategies.transformer.simpler(case, scope), 300):
        assert outside(simpler, scope) == []
        assert simpler.mesh.size <= case.mesh.size
        assert simpler != case


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_drawn_without_each_other_and_with_every_dtype(feature: str) -> None:
    with_it = [case for case in sample(CASES) if used(case)[feature] and case.parallel_size > 1]
    assert {case.dtype for case in with_it} == set(FORMATS)
    for other in set(FEATURES) - {feature}:
        assert any(not used(case)[other] for case in with_it), f"never without {other}"


@pytest.mark.parametrize(
    "wanted",
    [
        lambda c: c.parallel_size == 1 and c.mesh.size > 1,
        lambda c: c.kv_copies > 1 and c.kv_heads > 1,
        lambda c: c.kv_copies > 1 and c.qk_norm and c.sequence_parallel,
        lambda c: c.heads > c.parallel_size > 1,
        lambda c: len(c.leading) == 2 and c.backward == "reversed" and c.recompute == "full",
        lambda c: c.main_grad and c.dtype == "bf16" and c.norm == "rms",
        lambda c: c.mask == "padding" and c.leading[0][1] > 1 and c.leading[0][0] > 2,
        lambda c: not c.input_requires_grad,
        lambda c: c.backward == "never",
        lambda c: c.dropout == 0.5 and c.recompute != "none" and c.seed > 0,
        lambda c: c.recipes.weight.kind == "uniform",
        lambda c: c.recipes.input.kind == "spiky",
        lambda c: c.axis != "tp" and c.parallel_size > 1 and c.replicas > 1,
        lambda c: c.parallel_size == 8,
        lambda c: c.rotary and c.leading[0][0] == 320 and c.dtype == "bf16",
    ],
    ids=lambda f: str(f.__code__.co_firstlineno),
)
def test_what_hides_faults_elsewhere_is_drawn(wanted: Wanted) -> None:
    assert any(map(wanted, sample(CASES)))


def test_no_norm_is_of_so_few_features_that_it_gives_their_sign() -> None:
    assert min(case.hidden for case in sample(CASES)) == 4
    assert min(case.head_size for case in sample(CASES) if case.qk_norm) == 4
    assert min(case.head_size for case in sample(CASES)) == 1


def test_seeds_are_drawn_for_dropout_only() -> None:
    assert all(case.seed == 0 for case in sample(CASES) if not case.dropout)


def test_the_plainest_case() -> None:
    settings = hypothesis.settings(max_examples=2000, database=None, derandomize=False)
    case = hypothesis.find(CASES, lambda c: True, settings=settings, random=Random(0))
    assert case == TransformerCase(Mesh.of(tp=1), hidden=4, heads=1, kv_heads=1, ffn=1, leading=((2, 1),))


def shrunk(case: TransformerCase, fails: Wanted) -> tuple[TransformerCase, int]:
    """The case that taking the first proposal that fails ends at, and how many were tried on the way."""
    tried = 0
    while True:
        for simpler in strategies.transformer.simpler(case, FULL):
            tried += 1
            if fails(simpler):
                case = simpler
                break
        else:
            return case, tried


WIDE = TransformerCase(
    Mesh.of(dp=2, tp=4),
    hidden=32,
    heads=8,
    kv_heads=8,
    ffn=16,
    leading=((8, 3), (4, 2)),
    dtype="bf16",
    norm="rms",
    activation="swiglu",
    qk_norm=True,
    rotary=True,
    mask="padding",
    bias=True,
    sequence_parallel=True,
    recompute="full",
    explicit_group=True,
    main_grad=True,
    transposed=True,
    backward="reversed",
    recipes=TransformerRecipes(Recipe("spiky", 3), Recipe("normal", 4), Recipe("normal", 5), Recipe("uniform", 6)),
)


@pytest.mark.parametrize(
    ("changes", "fails", "rest"),
    [
        ({}, lambda c: c.parallel_size > 1, {}),
        ({}, lambda c: c.parallel_size > 1 and c.sequence_parallel, {"sequence_parallel": True}),
        ({}, lambda c: c.parallel_size > 1 and c.qk_norm and not c.rotary, {"qk_norm": True, "hidden": 8}),
        ({"kv_heads": 1}, lambda c: c.kv_copies > 1, {"kv_heads": 1}),
        (
            {"kv_heads": 2},
            lambda c: c.kv_copies > 1 and c.sequence_parallel,
            {"kv_heads": 1, "sequence_parallel": True},
        ),
        ({}, lambda c: c.parallel_size > 1 and len(c.leading) > 1, {"leading": ((2, 1), (2, 1))}),
        (
            {"dropout": 0.5, "seed": 9},
            lambda c: c.parallel_size > 1 and c.dropout and c.recompute == "full",
            {"dropout": 0.5, "recompute": "full"},
        ),
    ],
    ids=lambda value: str(value.__code__.co_firstlineno) if callable(value) else "",
)
def test_shrinking_ends_at_two_ranks_and_the_options_that_matter(
    changes: dict[str, object], fails: Wanted, rest: dict[str, object]
) -> None:
    case, tried = shrunk(dataclasses.replace(WIDE, **changes), fails)  # type: ignore[arg-type]
    plain = TransformerCase(Mesh.of(tp=2), hidden=4, heads=2, kv_heads=2, ffn=2, leading=((2, 1),))
    assert case == dataclasses.replace(plain, **rest)  # type: ignore[arg-type]
    assert tried < 400, "each is a run"


@given(CASES)
def test_simplifying_ends(case: TransformerCase) -> None:
    case, _ = shrunk(case, lambda c: True)
    assert (case.mesh.axes, case.hidden, case.leading) == (((case.axis, 1),), 4, ((2, 1),))
