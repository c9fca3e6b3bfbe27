"""What is drawn of sharded optimizers: nothing outside the scope, everything inside, and down to the smallest."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from drawing import sample
from hypothesis import given
from hypothesis import strategies as st

import strategies.sharded_optimizer
from reference.dtypes import FORMATS
from reference.mesh import AXES
from reference.sharded_optimizer import OF_STATE, ShardedOptimizerCase
from reference.sharded_optimizer_traffic import elements
from strategies.scope import Scope
from strategies.sharded_optimizer import FEATURES, simpler, within

FULL = Scope(max_world=8, features=frozenset(FEATURES))

scopes = st.builds(
    Scope,
    max_world=st.integers(1, 16),
    dtypes=st.lists(st.sampled_from(list(FORMATS)), min_size=1, unique=True).map(tuple),
    axes=st.lists(st.sampled_from(AXES), min_size=1, unique=True).map(tuple),
    features=st.sets(st.sampled_from(list(FEATURES))).map(frozenset),
)


def used(case: ShardedOptimizerCase, scope: Scope = FULL) -> dict[str, bool]:
    """The optional features that a case needs."""
    kinds = {one.kind for one in case.parameters}
    return {
        "sharded_optimizer_any_axis": case.axis != ("dp" if "dp" in scope.axes else scope.axes[0]),
        "sharded_optimizer_adamw": case.optimizer == "adamw",
        "sharded_optimizer_sum": case.reduction == "sum",
        "sharded_optimizer_reduce_dtype": case.reduce_dtype != "same",
        "sharded_optimizer_master": case.master,
        "sharded_optimizer_mixed": any(one.fp32 for one in case.parameters),
        "sharded_optimizer_frozen": "frozen" in kinds,
        "sharded_optimizer_missing": bool(kinds & {"some", "none", "first"}),
        "sharded_optimizer_load": bool(case.load) and not case.load_axis and case.invalid not in OF_STATE,
        "sharded_optimizer_load_other_size": case.load_axis is not None,
        "sharded_optimizer_refuses": case.invalid is not None and case.invalid not in OF_STATE,
        "sharded_optimizer_refuses_state": case.invalid in OF_STATE,
    }


def outside(case: ShardedOptimizerCase, scope: Scope) -> list[str]:
    """What of a case its scope does not allow."""
    allowed = {
        "max_world": case.mesh.size <= scope.max_world,
        "axes": set(case.mesh.names) <= set(scope.axes),
        "dtypes": case.dtype in scope.dtypes,
        **{feature: feature in scope.features or not uses for feature, uses in used(case, scope).items()},
    }
    return [what for what, is_allowed in allowed.items() if not is_allowed]


@given(scopes, st.data())
def test_what_a_scope_does_not_allow_is_never_drawn(scope: Scope, data: st.DataObject) -> None:
    case = data.draw(strategies.sharded_optimizer.cases(scope))
    assert outside(case, scope) == []
    assert within(case, scope)
    for one in itertools.islice(simpler(case, scope), 300):
        assert outside(one, scope) == []
        assert one.mesh.size <= case.mesh.size
        assert one != case


DRAWN = strategies.sharded_optimizer.cases(FULL)


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_drawn_without_each_other(feature: str) -> None:
    with_it = [case for case in sample(DRAWN) if used(case)[feature] and case.parallel_size > 1]
    assert with_it
    for other in set(FEATURES) - {feature}:
        assert any(not used(case)[other] for case in with_it), f"never without {other}"


def sizes(case: ShardedOptimizerCase) -> tuple[int, int]:
    """Of the axis before and after loading."""
    return case.parallel_size, case.mesh.axis_size(case.load_axis or case.axis)


@pytest.mark.parametrize(
    "wanted",
    [
        lambda c: c.exact and c.parallel_size > 2,
        lambda c: not c.exact and c.optimizer == "sgd" and c.momentum and c.weight_decay,
        lambda c: any(one.shape == () for one in c.parameters) and c.parallel_size > 1,
        lambda c: any(total % c.parallel_size for total in elements(c).values()),
        lambda c: any(total < c.parallel_size for total in elements(c).values()),
        lambda c: len(elements(c)) == 2 and c.master and c.reduce_dtype == "fp32" and c.parallel_size > 1,
        lambda c: any(c.parameters[i].elements > sum(elements(c).values()) / c.parallel_size for i in c.trained),
        lambda c: c.load_axis and sizes(c)[0] > sizes(c)[1] and c.optimizer == "adamw",
        lambda c: c.load_axis and sizes(c)[0] < sizes(c)[1] and c.momentum,
        lambda c: c.load_axis and min(sizes(c)) > 1 and sizes(c)[0] != sizes(c)[1],
        lambda c: c.load == 2 and c.load_axis is None and c.parallel_size > 1,
        lambda c: c.replicas > 1 and c.parallel_size > 1 and not c.load,
        lambda c: c.parallel_size == 8,
        lambda c: any(p.kind == "first" for p in c.parameters) and c.steps > 1 and c.optimizer == "adamw",
        lambda c: max(elements(c).values()) > 300 and c.parallel_size > 1,
        lambda c: c.dtype == "fp16" and c.optimizer == "adamw",
        *(lambda c, kind=kind: c.invalid == kind for kind in ("number", "shape", "dtype", "order", "empty", *OF_STATE)),
    ],
)
def test_what_has_gone_wrong_elsewhere_is_drawn(wanted: Callable[[ShardedOptimizerCase], bool]) -> None:
    assert any(wanted(case) for case in sample(DRAWN))


def test_shrinking_ends_at_the_plainest_case() -> None:
    case = max(sample(DRAWN), key=lambda c: (c.mesh.size, len(c.parameters), c.invalid is None))
    for _ in range(500):
        case = next(simpler(case, FULL), case)
    assert case.mesh.size == 1
    assert [one.elements for one in case.parameters] == [1]
    assert case.steps == 1
    assert not any(used(case)[feature] for feature in FEATURES if feature != "sharded_optimizer_any_axis")
