"""What is drawn of data parallelism: nothing outside the scope, everything inside, and down to the smallest."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from drawing import sample
from hypothesis import given
from hypothesis import strategies as st

import strategies.data_parallel
from reference.data_parallel import DataParallelCase, idle, trained
from reference.data_parallel_tokens import valid_tokens
from reference.dtypes import FORMATS
from reference.mesh import AXES
from strategies.data_parallel import FEATURES, simpler, within
from strategies.scope import Scope

FULL = Scope(max_world=8, features=frozenset(FEATURES))

scopes = st.builds(
    Scope,
    max_world=st.integers(1, 16),
    dtypes=st.lists(st.sampled_from(list(FORMATS)), min_size=1, unique=True).map(tuple),
    axes=st.lists(st.sampled_from(AXES), min_size=1, unique=True).map(tuple),
    features=st.sets(st.sampled_from(list(FEATURES))).map(frozenset),
)


def used(case: DataParallelCase, scope: Scope = FULL) -> dict[str, bool]:
    """The optional features that a case needs."""
    kinds = {layer.kind for layer in case.layers}
    several = case.micro_batches > 1
    return {
        "data_parallel_any_axis": case.axis != ("dp" if "dp" in scope.axes else scope.axes[0]),
        "data_parallel_no_sync": several and case.sync == "last",
        "data_parallel_sync_every": several and case.sync == "every",
        "data_parallel_sum": case.reduction == "sum",
        "data_parallel_reduce_dtype": case.reduce_dtype != "same",
        "data_parallel_main_grad": case.main_grad,
        "data_parallel_unused": "unused" in kinds or bool(case.skipped),
        "data_parallel_order": case.rotated,
        "data_parallel_tied": "tied" in kinds,
        "data_parallel_frozen": "frozen" in kinds,
        "data_parallel_views": case.views,
        "data_parallel_overlap": case.overlap,
        "data_parallel_refuses": case.invalid is not None,
    }


def outside(case: DataParallelCase, scope: Scope) -> list[str]:
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
    case = data.draw(strategies.data_parallel.cases(scope))
    assert outside(case, scope) == []
    assert within(case, scope)
    for one in itertools.islice(simpler(case, scope), 300):
        assert outside(one, scope) == []
        assert one.mesh.size <= case.mesh.size
        assert one != case


DRAWN = strategies.data_parallel.cases(FULL)


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_drawn_without_each_other(feature: str) -> None:
    with_it = [case for case in sample(DRAWN) if used(case)[feature] and case.parallel_size > 1]
    assert with_it
    for other in set(FEATURES) - {feature}:
        assert any(not used(case)[other] for case in with_it), f"never without {other}"


def some_rank_is_empty(case: DataParallelCase) -> bool:
    counts = valid_tokens(case, 0).sum((0, 1, 3, 4))
    return bool((counts == 0).any()) and bool(counts.any())


@pytest.mark.parametrize(
    "wanted",
    [
        lambda c: c.exact and c.loss == "token_mean" and c.parallel_size > 2,
        lambda c: c.exact and c.loss == "sample_mean" and c.parallel_size > 1,
        lambda c: not c.exact and c.loss == "sum",
        lambda c: some_rank_is_empty(c) and c.loss == "token_mean",
        lambda c: not valid_tokens(c, 0).any() and c.parallel_size > 1,
        lambda c: c.replicas > 1 and c.parallel_size > 1,
        lambda c: c.parallel_size == 8,
        lambda c: c.main_grad and c.exact and c.micro_batches > 7 and c.dtype == "bf16",
        lambda c: c.features > 64 and c.parallel_size > 1 and c.bucket == 1000,
        lambda c: c.steps > 1 and set(idle(c, 1)) - set(idle(c, 0)),
        lambda c: c.bucket == 1 and len(trained(c)) > 3,
        lambda c: 3 <= c.bucket <= 20 and any(shape[0] * shape[-1] > c.bucket for shape in trained(c).values()),
        lambda c: idle(c) and any(place[1:] != (0, 0) for place in c.skipped),
        lambda c: c.steps == 2 and c.rotated and c.overlap and c.views,
        lambda c: c.main_grad and c.reduce_dtype == "bf16",
        lambda c: c.dtype == "bf16" and c.reduce_dtype == "fp32" and not c.main_grad and c.parallel_size > 2,
        lambda c: c.reduction == "sum" and c.sync == "every" and c.micro_batches == 3,
        lambda c: c.invalid == "order",
        lambda c: c.invalid == "dtype",
    ],
)
def test_what_has_gone_wrong_elsewhere_is_drawn(wanted: Callable[[DataParallelCase], bool]) -> None:
    assert any(wanted(case) for case in sample(DRAWN))


def test_shrinking_ends_at_the_plainest_case() -> None:
    case = max(sample(DRAWN), key=lambda c: (c.mesh.size, len(c.layers), c.invalid is None))
    for _ in range(500):
        case = next(simpler(case, FULL), case)
    assert case.mesh.size == 1
    assert len(case.layers) == 1
    assert (case.features, case.micro_batches, case.samples, case.length, case.steps) == (1, 1, 1, 1, 1)
    assert not any(used(case)[feature] for feature in FEATURES if feature != "data_parallel_any_axis")
