"""What is drawn of mixed-precision optimizers: nothing outside the scope, all inside, and down to the smallest."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from drawing import sample
from hypothesis import given, settings
from hypothesis import strategies as st

import strategies.mixed_precision
from reference.mesh import AXES
from reference.mixed_precision import DTYPES, OF_STATE, MixedPrecisionCase
from reference.mixed_precision_steps import plan, tensors
from strategies.mixed_precision import FEATURES, needs, within
from strategies.mixed_precision_simpler import simpler
from strategies.scope import Scope

FULL = Scope(max_world=8, features=frozenset(FEATURES))
DRAWN = strategies.mixed_precision.cases(FULL)

scopes = st.builds(
    Scope,
    max_world=st.integers(1, 16),
    dtypes=st.lists(st.sampled_from(DTYPES[1:]), min_size=1, unique=True).map(lambda low: ("fp32", *low)),
    axes=st.lists(st.sampled_from(AXES), unique=True).map(tuple),
    features=st.sets(st.sampled_from(list(FEATURES))).map(frozenset),
)


@settings(max_examples=60)
@given(scopes, st.data())
def test_what_a_scope_does_not_allow_is_never_drawn(scope: Scope, data: st.DataObject) -> None:
    case = data.draw(strategies.mixed_precision.cases(scope))
    assert within(case, scope), {name for name, needed in needs(case).items() if needed} - scope.features
    assert case.mesh.size <= scope.max_world
    assert set(case.mesh.names) <= set(scope.axes)
    for one in itertools.islice(simpler(case, scope), 100):
        assert within(one, scope)
        assert one.mesh.size <= case.mesh.size
        assert one != case


#: What cannot be without another.
IMPLIED = {
    "mixed_precision_tied": "mixed_precision_stages",
    "mixed_precision_uneven": "mixed_precision_split",
    "mixed_precision_hysteresis": "mixed_precision_dynamic",
}


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_drawn_without_each_other(feature: str) -> None:
    with_it = [needs(case) for case in sample(DRAWN) if needs(case)[feature] and case.mesh.size > 1]
    assert with_it
    for other in set(FEATURES) - {feature, IMPLIED.get(feature)}:
        assert any(not one[other] for one in with_it), f"never without {other}"


def some_skipped(case: MixedPrecisionCase) -> bool:
    skips = [one.skipped for one in plan(case, tensors(case))]
    return any(skips) and not all(skips)


@pytest.mark.parametrize(
    "wanted",
    [
        lambda c: c.exact and c.mesh.size > 2,
        lambda c: not c.exact and c.optimizer == "sgd" and c.momentum and any(one.weight_decay for one in c.groups),
        lambda c: c.sharded and c.replicas > 2 and c.clip,
        lambda c: c.sharded and some_skipped(c) and any(len(one.axes) > 1 for one in c.overflows),
        *(
            lambda c, axis=axis: any(one.axes == (axis,) for one in c.overflows) and c.mesh.axis_size(axis) > 1
            for axis in ("tp", "pp", "dp")
        ),
        lambda c: not c.overflows and some_skipped(c),
        lambda c: c.warmup and some_skipped(c) and c.groups[0].lr,
        lambda c: c.optimizer == "adamw" and some_skipped(c) and c.steps > 2,
        lambda c: c.reload and c.dtype == "bf16" and c.optimizer == "adamw",
        lambda c: c.load and c.sharded and c.optimizer == "adamw",
        lambda c: len({one.lr for one in c.groups}) == 2 and 0.0 in {one.lr for one in c.groups},
        lambda c: c.mesh.size == 8 and len([name for name in c.mesh.names if c.mesh.axis_size(name) > 1]) == 3,
        lambda c: len(c.stages(0)) == 2 and c.clip,
        lambda c: c.dtype == "fp16" and not c.main_grad and any(one.fp32 for one in c.parameters),
        lambda c: any(one.kind == "first" for one in c.parameters) and c.steps > 1,
        *(lambda c, kind=kind: c.invalid == kind for kind in ("dtype", "lr_negative", *OF_STATE)),
    ],
)
def test_what_has_gone_wrong_elsewhere_is_drawn(wanted: Callable[[MixedPrecisionCase], bool]) -> None:
    assert any(wanted(case) for case in sample(DRAWN))


def test_shrinking_ends_at_the_plainest_case() -> None:
    case = max(sample(DRAWN), key=lambda c: (c.mesh.size, len(c.parameters), c.steps, c.invalid is None))
    for _ in range(500):
        case = next(simpler(case, FULL), case)
    assert (case.mesh.size, [one.size for one in case.parameters], case.steps) == (1, [1], 1)
    assert {name for name, needed in needs(case).items() if needed} == {"mixed_precision_fp32"}
