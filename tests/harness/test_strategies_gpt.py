"""What is drawn of GPTs: nothing outside the scope, everything inside, and down to the smallest."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import strategies.gpt
from reference.dtypes import FORMATS
from reference.gpt import GptCase
from reference.gpt_parameters import valid_tokens
from reference.mesh import AXES
from strategies.gpt import FEATURES, needs, simpler, within
from strategies.scope import Scope

FULL = Scope(max_world=8, features=frozenset(FEATURES))
_LEAST = {"gpt_gpipe", "gpt_untied", "gpt_no_positions", "gpt_layer_norm", "gpt_gelu", "gpt_few"}

scopes = st.builds(
    Scope,
    max_world=st.integers(1, 16),
    dtypes=st.lists(st.sampled_from(list(FORMATS)), min_size=1, unique=True).map(tuple),
    axes=st.lists(st.sampled_from(AXES), unique=True).map(tuple),
    features=st.sets(st.sampled_from(list(FEATURES))).map(lambda some: frozenset({*_LEAST, *some})),
)


def outside(case: GptCase, scope: Scope) -> list[str]:
    """What of a case its scope does not allow."""
    allowed = {
        "max_world": case.mesh.size <= scope.max_world,
        "axes": set(case.mesh.names) <= set(scope.axes),
        "dtypes": case.dtype in scope.dtypes,
        **{feature: feature in scope.features or not needed for feature, needed in needs(case).items()},
    }
    return [what for what, is_allowed in allowed.items() if not is_allowed]


@settings(max_examples=30)
@given(scopes, st.data())
def test_what_a_scope_does_not_allow_is_never_drawn(scope: Scope, data: st.DataObject) -> None:
    case = data.draw(strategies.gpt.cases(scope))
    assert outside(case, scope) == []
    assert within(case, scope)
    for one in itertools.islice(simpler(case, scope), 60):
        assert outside(one, scope) == []
        assert one.mesh.size <= case.mesh.size
        assert one != case


@cache
def sample() -> tuple[GptCase, ...]:
    """The same cases every time."""
    drawn: list[GptCase] = []

    @hypothesis.seed(0)
    @hypothesis.settings(max_examples=500, database=None, derandomize=False, phases=[hypothesis.Phase.generate])
    @given(strategies.gpt.cases(FULL))
    def collect(case: GptCase) -> None:
        drawn.append(case)

    collect()
    return tuple(drawn)


def sizes(case: GptCase) -> tuple[int, ...]:
    return tuple(case.mesh.axis_size(axis) for axis in ("tp", "pp", "dp"))


DRAWN: dict[str, Callable[[GptCase], bool]] = {
    "tp x pp x dp": lambda case: sizes(case) == (2, 2, 2),
    "any order": lambda case: case.mesh.names[:2] == ("pp", "tp"),
    "replicas": lambda case: case.replicas > 1,
    "more than two stages on ranks": lambda case: case.mesh.axis_size("pp") > 2,
    "tied over the pipeline": lambda case: case.tied and case.mesh.axis_size("pp") > 1,
    "tied, sharded": lambda case: case.tied and case.update == "sharded" and case.mesh.axis_size("pp") > 1,
    "tied, main_grad": lambda case: case.tied and case.main_grad and case.stages > 1,
    "tied over chunks of one rank": lambda case: case.tied and case.chunks > 1 and case.mesh.axis_size("pp") == 1,
    "sequence parallel, learned": lambda case: case.sequence_parallel and case.positions == "learned",
    "sequence parallel, sharded": lambda case: case.sequence_parallel and case.update == "sharded",
    "unequal ranks": lambda case: len(set(valid_tokens(case).sum((0, 2, 3)).tolist())) > 1,
    "a rank without a token": lambda case: 0 in valid_tokens(case).sum((0, 2, 3)).tolist(),
    "no token": lambda case: not valid_tokens(case).any(),
    "key/value heads shared by ranks": lambda case: case.kv_heads < case.mesh.axis_size("tp"),
    "a stage in the middle without a layer": lambda case: 0 in map(case.depth, range(1, case.stages - 1)),
    "four layers": lambda case: case.layers == 4,
}


@pytest.mark.parametrize("what", DRAWN)
def test_is_drawn(what: str) -> None:
    assert any(map(DRAWN[what], sample()))


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_drawn(feature: str) -> None:
    assert any(needs(case).get(feature) for case in sample())


def test_the_simplest_is_on_one_rank_and_plain() -> None:
    for case in sample()[:20]:
        one, steps = case, 0
        while (found := next(iter(simpler(one, FULL)), None)) is not None:
            one, steps = found, steps + 1
            assert steps < 100
        assert one.mesh.size == 1
        assert one.micro_batches == 1
        assert (one.tied, one.bias, one.update, one.recompute) == (False, False, "none", "none")
