"""What is drawn of pipelines: nothing outside the scope, everything inside, and down to the smallest."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from drawing import sample
from hypothesis import given, settings
from hypothesis import strategies as st

import strategies.pipeline
from reference.dtypes import FORMATS
from reference.mesh import AXES
from reference.pipeline import PipelineCase
from reference.pipeline_gradients import expected
from reference.pipeline_stages import blocks_of, exact, tensors, tied, valid_tokens
from strategies.pipeline import FEATURES
from strategies.pipeline_simpler import needs, simpler, within
from strategies.scope import Scope

FULL = Scope(max_world=8, features=frozenset(FEATURES))

scopes = st.builds(
    Scope,
    max_world=st.integers(1, 16),
    dtypes=st.lists(st.sampled_from(list(FORMATS)), min_size=1, unique=True).map(tuple),
    axes=st.lists(st.sampled_from(AXES), min_size=1, unique=True).map(tuple),
    features=st.sets(st.sampled_from(list(FEATURES))).map(lambda some: frozenset({"pipeline_gpipe", *some})),
)


def outside(case: PipelineCase, scope: Scope) -> list[str]:
    """What of a case its scope does not allow."""
    own = "pp" if "pp" in scope.axes else scope.axes[0]
    needed = {**needs(case), "pipeline_any_axis": case.axis != own}
    allowed = {
        "max_world": case.mesh.size <= scope.max_world,
        "axes": set(case.mesh.names) <= set(scope.axes),
        "dtypes": case.dtype in scope.dtypes,
        **{feature: feature in scope.features or not needed for feature, needed in needed.items()},
    }
    return [what for what, is_allowed in allowed.items() if not is_allowed]


@settings(max_examples=40)
@given(scopes, st.data())
def test_what_a_scope_does_not_allow_is_never_drawn(scope: Scope, data: st.DataObject) -> None:
    case = data.draw(strategies.pipeline.cases(scope))
    assert outside(case, scope) == []
    assert within(case, scope)
    for one in itertools.islice(simpler(case, scope), 100):
        assert outside(one, scope) == []
        assert one.mesh.size <= case.mesh.size
        assert one != case


DRAWN = strategies.pipeline.cases(FULL)


@pytest.mark.parametrize("feature", sorted(set(FEATURES) - {"pipeline_any_axis", "pipeline_same_bits"}))
def test_every_feature_is_drawn_on_several_ranks(feature: str) -> None:
    assert any(needs(case)[feature] and case.parallel_size > 1 for case in sample(DRAWN, 500))


def test_two_steps_of_an_optimizer_stay_in_range() -> None:
    """What a step makes of parameters is multiplied by all stages: no results beyond the format, and no NaN."""
    several = [case for case in sample(DRAWN, 500) if case.update == "sharded" and case.steps > 1 and not case.invalid]
    assert len(several) > 5
    assert any(not exact(case) for case in several)
    for case in several:
        for name, x in expected(case, tensors(case)).items():
            assert x is None or bool(x.isfinite().all()), (case, name)


def no_valid_token_in_some(case: PipelineCase) -> bool:
    counts = [int(one.sum()) for one in valid_tokens(case, 0)[0].split(list(case.sizes))]
    return 0 in counts and len(set(counts)) > 1


@pytest.mark.parametrize(
    "wanted",
    [
        lambda case: case.micro_batches < case.parallel_size and case.schedule == "1f1b",
        lambda case: case.parallel_size == 1 and case.chunks > 1,
        lambda case: case.parallel_size == 2 and case.chunks > 1,
        lambda case: case.micro_batches == 1,
        lambda case: case.micro_batches > 8 and case.parallel_size > 1 and case.chunks > 1,
        lambda case: len({len(blocks_of(case, stage)) for stage in range(case.stages)}) > 1,
        lambda case: any(not any(b.source is not None for b in blocks_of(case, s)) for s in range(case.stages)),
        lambda case: len({one.stage for one in tied(case)}) > 2 and case.parallel_size > 2,
        lambda case: tied(case) and case.coordinate_of(tied(case)[-1].stage) not in (0, case.parallel_size - 1),
        lambda case: tied(case) and case.update == "sharded" and case.replicas > 1,
        lambda case: case.drops and case.recompute and case.parallel_size > 1,
        lambda case: case.loss == "token_mean" and no_valid_token_in_some(case),
        lambda case: case.skip == "never" and case.ids and case.parallel_size > 2,
        lambda case: exact(case) and case.dtype == "bf16" and case.parallel_size > 1,
        lambda case: not exact(case) and case.dtype == "fp32",
        lambda case: len(case.mesh.axes) == 2 and case.replicas > 1 and case.parallel_size > 1,
    ],
)
def test_what_is_hard_is_drawn(wanted: Callable[[PipelineCase], bool]) -> None:
    assert any(wanted(case) for case in sample(DRAWN, 500) if case.invalid is None)


@pytest.mark.parametrize("kind", ["no_micro_batches", "small_batch", "chunks", "shape", "dtype", "raises"])
def test_every_invalid_case_is_drawn(kind: str) -> None:
    assert any(case.invalid == kind for case in sample(DRAWN, 500))


def test_simpler_cases_lead_to_the_plainest() -> None:
    for case in sample(DRAWN, 500)[:40]:
        if case.invalid is not None:
            continue
        for _ in range(200):
            following = next(iter(simpler(case, FULL)), None)
            if following is None:
                break
            case = following
        assert case.mesh.size == 1
        assert (len(case.blocks), case.micro_batches, case.chunks, case.stages) == (1, 1, 1, 1), case
