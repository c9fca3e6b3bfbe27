"""The expected values of the collectives against what each rank computes by hand, rank by rank, in numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.collectives import KINDS, CollectivesCase, CollectivesRecipes, expected, layouts, tensors
from reference.collectives_traffic import needed
from reference.layout import window
from reference.mesh import Mesh
from reference.recipe import Recipe
from strategies.collectives import FEATURES, cases, simpler, within
from strategies.scope import Scope

Locals = list[np.ndarray]
FULL = Scope(max_world=8, parts=frozenset(["collective"]), features=frozenset(FEATURES))

everything = cases(FULL)


def held(case: CollectivesCase, role: str, tensor: torch.Tensor) -> Locals:
    """What each rank holds."""
    layout = layouts(case)[role]
    return [window(tensor.shape, layout, case.mesh, rank).take(tensor.numpy()) for rank in range(case.mesh.size)]


def group(case: CollectivesCase, rank: int) -> list[int]:
    return [int(r) for r in case.mesh.group_of(rank, case.axis)]


def summed(case: CollectivesCase, parts: Locals, rank: int) -> np.ndarray:
    return np.sum([parts[r] for r in group(case, rank)], axis=0)


def joined(case: CollectivesCase, parts: Locals, rank: int) -> np.ndarray:
    return np.concatenate([parts[r] for r in group(case, rank)], axis=case.dim)


def own(case: CollectivesCase, whole: np.ndarray, rank: int) -> np.ndarray:
    ranks = group(case, rank)
    return np.array_split(whole, len(ranks), axis=case.dim)[ranks.index(rank)]


def by_hand(case: CollectivesCase, parts: Locals, backward: bool) -> Locals:
    """What the ranks hold afterwards."""
    conjugates = {
        "copy": "reduce",
        "reduce": "copy",
        "scatter": "gather",
        "gather": "scatter",
        "gather_sequence": "reduce_scatter",
        "reduce_scatter": "gather",
    }
    kind = conjugates[case.kind] if backward else case.kind
    made = []
    for rank in range(case.mesh.size):
        if kind == "copy":
            made.append(parts[rank])
        elif kind == "reduce":
            made.append(summed(case, parts, rank))
        elif kind == "scatter":
            made.append(own(case, parts[rank], rank))
        elif kind == "reduce_scatter":
            made.append(own(case, summed(case, parts, rank), rank))
        else:
            made.append(joined(case, parts, rank))
    return made


def assert_sums_agree(got: np.ndarray, right: np.ndarray, magnitude: np.ndarray, count: int) -> None:
    """Two sums of ``count`` terms in float64, in any order: each errs by at most count u sum |x| (Higham, Accuracy and
    Stability of Numerical Algorithms, 2nd ed., section 4.2)."""
    with np.errstate(invalid="ignore"):
        off = np.where((got == right) | (np.isnan(got) & np.isnan(right)), 0.0, np.abs(got - right))
    assert (off <= 2 * count * 2.0**-53 * np.nan_to_num(magnitude, posinf=0.0)).all(), (got, right)


@given(everything)
def test_expected_is_what_the_ranks_compute(case: CollectivesCase) -> None:
    given_tensors = tensors(case)
    want = expected(case, given_tensors)
    for m in range(len(case.shapes)):
        pairs = [("input", f"input[{m}]", "output", f"output[{m}]", False)]
        if case.trains:
            pairs.append(("output", f"output[{m}].grad", "input", f"input[{m}].grad", True))
        else:
            assert want[f"input[{m}].grad"] is None
        for enters, given_name, leaves, name, backward in pairs:
            value = want[name]
            assert value is not None
            parts = held(case, enters, given_tensors[given_name])
            computed, terms = by_hand(case, parts, backward), by_hand(case, [np.abs(part) for part in parts], backward)
            for got, right, magnitude in zip(held(case, leaves, value), computed, terms, strict=True):
                if case.exact:
                    np.testing.assert_array_equal(got, right)
                else:
                    assert_sums_agree(got, right, magnitude, case.parallel_size)


@given(everything)
def test_what_is_drawn_is_within_the_scope_and_so_is_what_is_simpler(case: CollectivesCase) -> None:
    assert within(case, FULL)
    assert case.mesh.size <= FULL.max_world
    for simple in itertools.islice(simpler(case, FULL), 5):
        assert within(simple, FULL)
        assert simple != case


@given(st.data())
def test_a_narrow_scope_is_kept(data: st.DataObject) -> None:
    narrow = Scope(max_world=4, axes=("tp", "dp"), parts=frozenset(["collective"]))
    case = data.draw(cases(narrow))
    n = case.parallel_size
    assert case.axis == "tp"
    assert all(shape[case.dim] % n == 0 for shape in case.shapes)
    sequence = case.kind in ("gather_sequence", "reduce_scatter")
    assert all(case.dim == (-len(shape) if sequence else -1) for shape in case.shapes)


@pytest.mark.parametrize("kind", KINDS)
def test_every_conjugate_moves_what_the_table_says(kind: str) -> None:
    case = CollectivesCase(Mesh.of(tp=2, dp=2), kind, ((4, 3),), dim=-2)
    table = {
        "copy": [("backward", "all_reduce", 12)],
        "reduce": [("forward", "all_reduce", 12)],
        "scatter": [("backward", "all_gather", 6)],
        "gather": [("forward", "all_gather", 6)],
        "gather_sequence": [("forward", "all_gather", 6), ("backward", "reduce_scatter", 12)],
        "reduce_scatter": [("forward", "reduce_scatter", 12), ("backward", "all_gather", 6)],
    }
    assert [(one.phase, one.operation, one.elements) for one in needed(case)] == table[kind]
    assert needed(CollectivesCase(Mesh.of(tp=1, dp=2), kind)) == ()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "broadcast"}, "kind is 'broadcast': expected one of copy"),
        ({"axis": "pp"}, "axis 'pp' is not in the mesh"),
        ({"shapes": ()}, "expected one or more"),
        ({"shapes": ((2, 0),)}, "dimensions of at least 1"),
        ({"dim": 0}, "dim 0 is not in every one"),
        ({"dim": -3}, "dim -3 is not in every one"),
        ({"backward": "soon"}, "backward is 'soon'"),
        ({"dtype": "fp8"}, "fp8"),
    ],
)
def test_what_is_no_case_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CollectivesCase(**{"mesh": Mesh.of(tp=2), "kind": "copy", "shapes": ((2, 2),), **changes})  # type: ignore[arg-type]


def test_data_that_rounds_is_not_exact() -> None:
    rounding = CollectivesRecipes(input=Recipe("normal"))
    assert CollectivesCase(Mesh.of(tp=2), "copy").exact
    assert not CollectivesCase(Mesh.of(tp=2), "copy", recipes=rounding).exact
