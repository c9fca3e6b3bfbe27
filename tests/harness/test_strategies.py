"""What the strategies draw: nothing outside the scope, everything inside, and down to the smallest."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from random import Random
from typing import Any

import hypothesis
import pytest
import torch
from drawing import FULL, sample
from hypothesis import given
from hypothesis import strategies as st

import strategies.linear
import strategies.mesh
from harness.draws import register
from reference.dtypes import FORMATS
from reference.linear import LinearCase, tensors
from reference.mesh import AXES, MeshCase
from strategies.layers import leadings
from strategies.linear import FEATURES
from strategies.scope import Scope

parts = st.sampled_from([{"column_linear"}, {"row_linear"}, {"column_linear", "row_linear"}]).map(frozenset)
scopes = st.builds(
    Scope,
    max_world=st.integers(1, 16),
    largest_mesh=st.integers(1, 10**6),
    dtypes=st.lists(st.sampled_from(list(FORMATS)), min_size=1, unique=True).map(tuple),
    axes=st.lists(st.sampled_from(AXES), unique=True).map(lambda axes: ("tp", *(a for a in axes if a != "tp"))),
    parts=parts,
    features=st.sets(st.sampled_from(list(FEATURES))).map(frozenset),
    token_dims=st.lists(st.integers(1, 4), min_size=1, unique=True).map(tuple),
    checks_initialization=st.booleans(),
)


def used(case: LinearCase) -> dict[str, bool]:
    """The optional features that a case needs."""
    n = case.parallel_size
    cut_feature = case.in_features if case.kind == "row" else case.out_features
    return {
        "gather_output": case.gather_output,
        "input_not_parallel": not case.input_is_parallel,
        "skip_bias_add": case.skip_bias_add,
        "sequence_parallel": case.sequence_parallel,
        "uneven": cut_feature % n != 0,
        "uneven_sequence": case.sequence_parallel and any(dims[0] % n for dims in case.leading),
        "explicit_group": case.explicit_group,
        "main_grad": case.main_grad,
        "column_weight_at_call": case.kind == "column" and case.weight_at_call,
        "row_weight_at_call": case.kind == "row" and case.weight_at_call,
    }


def outside(case: LinearCase, scope: Scope) -> list[str]:
    """What of a case its scope does not allow."""
    allowed = {
        "kind": f"{case.kind}_linear" in scope.parts,
        "max_world": case.mesh.size <= scope.max_world,
        "axes": set(case.mesh.names) <= set(scope.axes),
        "dtypes": case.dtype in scope.dtypes,
        "token_dims": all(len(dims) in scope.token_dims for dims in case.leading),
        "init": scope.checks_initialization or not case.init,
        "skip_bias_add without bias": case.bias or not case.skip_bias_add,
        "gather_output of a row layer": case.kind == "column" or not case.gather_output,
        "input_is_parallel of a column layer": case.kind == "row" or case.input_is_parallel,
        **{feature: feature in scope.features or not uses for feature, uses in used(case).items()},
    }
    return [what for what, is_allowed in allowed.items() if not is_allowed]


@given(scopes, st.data())
def test_what_a_scope_does_not_allow_is_never_drawn(scope: Scope, data: st.DataObject) -> None:
    case = data.draw(strategies.linear.cases(scope))
    assert outside(case, scope) == []
    assert strategies.linear.within(case, scope)
    made = tensors(case)  # raises where lattice data does not fit the dtype
    for name, tensor in made.items():
        held = tensor.to(case.format.torch_dtype).to(torch.float64)
        assert torch.equal(held.nan_to_num(), tensor.nan_to_num()), f"{name} is not representable"


@given(strategies.linear.cases(dataclasses.replace(FULL, max_world=16, dtypes=("bf16",), token_dims=(4,))))
def test_many_tokens_are_exact_in_bf16(case: LinearCase) -> None:
    assert sum(math.prod(dims) for dims in case.leading) <= 256
    tensors(case)


@given(scopes, st.data())
def test_what_is_simpler_is_in_the_scope_too(scope: Scope, data: st.DataObject) -> None:
    case = data.draw(strategies.linear.cases(scope))
    for simpler in itertools.islice(strategies.linear.simpler(case, scope), 300):
        assert outside(simpler, scope) == []
        assert simpler.mesh.size <= case.mesh.size
        assert simpler != case


@given(scopes, st.sampled_from([{"group"}, {"group_ranks"}, {"group", "group_ranks"}]), st.data())
def test_meshes_are_in_the_scope(scope: Scope, methods: set[str], data: st.DataObject) -> None:
    scope = dataclasses.replace(scope, parts=frozenset(methods))
    case = data.draw(strategies.mesh.cases(scope))
    assert ("group" if case.live else "group_ranks") in methods
    assert set(case.mesh.names) <= set(scope.axes)
    assert case.mesh.size <= (scope.max_world if case.live else scope.largest_mesh)
    for simpler in strategies.mesh.simpler(case, scope):
        assert (simpler.mesh.size, len(simpler.mesh.axes)) <= (case.mesh.size, len(case.mesh.axes))
        assert simpler != case
        assert simpler.live == case.live


LINEAR, MESHES = strategies.linear.cases(FULL), strategies.mesh.cases(FULL)


def sizes_above_one(case: LinearCase | MeshCase) -> list[int]:
    return [size for _, size in case.mesh.axes if size > 1]


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_drawn_alone_and_with_every_dtype(feature: str) -> None:
    with_it = [case for case in sample(LINEAR, 1500) if used(case)[feature] and case.mesh.size > 1]
    assert {case.dtype for case in with_it} == set(FORMATS)
    for other in set(FEATURES) - {feature}:
        implied = feature == "uneven_sequence" and other == "sequence_parallel"
        assert implied or any(not used(case)[other] for case in with_it), f"never without {other}"


@pytest.mark.parametrize(
    "wanted",
    [
        lambda c: c.parallel_size == 1 and c.mesh.size > 1,
        lambda c: c.parallel_size > c.out_features and c.kind == "column",
        lambda c: c.parallel_size > c.in_features and c.kind == "row",
        lambda c: c.sequence_parallel and any(dims[0] < c.parallel_size for dims in c.leading),
        lambda c: len({dims[0] for dims in c.leading}) > 1,
        lambda c: not c.input_requires_grad and c.weight_requires_grad,
        lambda c: c.input_requires_grad and not c.weight_requires_grad,
        lambda c: c.bias and not c.bias_requires_grad,
        lambda c: not c.trained and c.backward != "never",
        lambda c: c.backward == "never" and c.weight_requires_grad,
        lambda c: c.backward == "delayed" and len(c.leading) > 1,
        lambda c: c.backward == "reversed" and len(c.leading) > 2,
        lambda c: c.main_grad and len(c.leading) > 1 and c.dtype == "bf16",
        lambda c: c.transposed and c.sequence_parallel,
        lambda c: c.init and c.bias,
        lambda c: c.recipes.weight.kind == "zeros",
        lambda c: c.recipes.output_grad.kind == "constant_per_rank",
        lambda c: not c.exact and c.dtype == "fp64",
        lambda c: not c.exact and c.recipes.weight.kind == "lattice",
        lambda c: c.exact and c.recipes.input.inject is not None,
        lambda c: not c.exact and any(r.inject for r in vars(c.recipes).values()),
        lambda c: any(r.kind == "near_overflow" for r in vars(c.recipes).values()),
        lambda c: any(r.kind == "subnormal" for r in vars(c.recipes).values()),
        lambda c: len(set(sizes_above_one(c))) == 2,
        lambda c: len(sizes_above_one(c)) == 3,
        lambda c: c.mesh.size == 8,
        lambda c: c.mesh.size in (5, 7),
    ],
    ids=lambda f: str(f.__code__.co_firstlineno),
)
def test_what_hides_faults_elsewhere_is_drawn(wanted: Callable[[LinearCase], bool]) -> None:
    assert any(map(wanted, sample(LINEAR, 1500)))


def test_every_kind_axis_position_and_number_of_tokens_is_drawn() -> None:
    drawn = sample(LINEAR, 1500)
    assert {(c.kind, c.axis) for c in drawn if c.parallel_size > 1} == set(itertools.product(["column", "row"], AXES))
    assert {(c.axis, c.mesh.names.index(c.axis)) for c in drawn} >= set(itertools.product(AXES, range(3)))
    assert {len(dims) for c in drawn for dims in c.leading} == set(FULL.token_dims)
    assert {len(c.leading) for c in drawn} == {1, 2, 3}
    assert {c.in_features for c in drawn} >= set(range(1, 13))
    assert {c.out_features for c in drawn} >= set(range(1, 13))


def test_meshes_of_every_axis_at_every_position_are_drawn() -> None:
    drawn = sample(MESHES, 1500)
    live = [c.mesh for c in drawn if c.live]
    pure = [c.mesh for c in drawn if not c.live]
    assert {(name, i) for m in live for i, name in enumerate(m.names)} == set(itertools.product(AXES, range(3)))
    assert {(name, i) for m in pure for i, name in enumerate(m.names)} >= set(itertools.product(AXES, range(3)))
    assert any(len(m.axes) == len(AXES) for m in pure)
    assert {m.size for m in live} == set(range(1, 9))
    assert any(len({size for _, size in m.axes if size > 1}) > 1 for m in live), "axes of different sizes"
    assert any(sum(size > 1 for _, size in m.axes) >= 4 for m in pure), "many axes"
    assert max(m.size for m in pure) > 10**5
    assert any(m.axes == () for m in live)


def smallest(strategy: st.SearchStrategy[Any], wanted: Callable[[Any], bool]) -> Any:
    phases = [hypothesis.Phase.generate, hypothesis.Phase.shrink]
    settings = hypothesis.settings(max_examples=2000, database=None, derandomize=False, phases=phases)
    return hypothesis.find(strategy, wanted, settings=settings, random=Random(0))


def test_micro_batches_of_one_shape_are_drawn_and_of_several() -> None:
    """What keeps a buffer or a mask of one call for the next shows only where shapes are equal."""
    drawn: list[list[tuple[int, ...]]] = []

    @hypothesis.settings(max_examples=300, database=None, deadline=None, backend=register())
    @hypothesis.seed(1)
    @given(st.data())
    def draw(data: st.DataObject) -> None:
        drawn.append(list(data.draw(leadings(2, 4))))

    draw()
    several = [leading for leading in drawn if len(leading) > 1]
    alike = sum(len(set(leading)) == 1 for leading in several)
    assert len(several) / 4 < alike < len(several) * 0.7, (alike, len(several))


def test_the_plainest_case() -> None:
    case = smallest(LINEAR, lambda c: True)
    assert case == LinearCase(case.mesh, "column", 1, 1)
    assert case.mesh.axes == (("tp", 1),)


@pytest.mark.parametrize(
    "wanted",
    [
        lambda c: c.parallel_size > 1,
        lambda c: c.parallel_size > 1 and c.kind == "row" and c.bias,
        lambda c: c.parallel_size > 1 and c.sequence_parallel and c.bias_requires_grad,
        lambda c: c.parallel_size > 1 and c.gather_output and c.dtype == "bf16",
        lambda c: c.parallel_size > 1 and not c.input_is_parallel and c.skip_bias_add,
        lambda c: c.parallel_size > 1 and c.main_grad and len(c.leading) == 2,
        lambda c: used(c)["uneven"],
    ],
    ids=lambda f: str(f.__code__.co_firstlineno),
)
def test_shrinking_ends_at_two_ranks_and_few_features(wanted: Callable[[LinearCase], bool]) -> None:
    case = smallest(LINEAR, wanted)
    assert case.mesh.axes == (("tp", 2),)
    assert max(case.in_features, case.out_features) <= 2
    assert math.prod(math.prod(dims) for dims in case.leading) <= 2


def test_shrinking_meshes_ends_at_the_smallest() -> None:
    case = smallest(MESHES, lambda c: not c.live and c.mesh.axis_size("dp") > 2 and c.mesh.axis_size("tp") > 1)
    assert sorted(case.mesh.axes) == [("dp", 3), ("tp", 2)]
    assert smallest(MESHES, lambda c: c.live and c.mesh.size > 4).mesh.axes == (("tp", 5),)


@given(LINEAR)
def test_simplifying_ends_at_a_case_that_nothing_is_simpler_than(case: LinearCase) -> None:
    """Taking the first proposal each time, as long as the layer stays cut and keeps its kind, axis and options."""

    def still(c: LinearCase) -> bool:
        return c.parallel_size >= min(2, case.parallel_size) and c.dtype == case.dtype and used(c)["uneven"] == uneven

    uneven = used(case)["uneven"]
    steps = 0
    while (simpler := next(filter(still, strategies.linear.simpler(case, FULL)), None)) is not None:
        case, steps = simpler, steps + 1
        assert steps < 100
    assert case.mesh.axes == ((case.axis, min(2, case.parallel_size)),)
    assert max(case.in_features, case.out_features) <= 2
    assert (case.leading, case.bias, case.transposed) in [((dims,), False, False) for dims in [(1,), (1, 1), (1, 1, 1)]]
