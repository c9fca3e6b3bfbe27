"""The expected values of reductions against what each rank computes by hand, in numpy; what is drawn; its bytes."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from drawing import sample
from hypothesis import given
from hypothesis import strategies as st

from reference.all_reduce import AllReduceCase, AllReduceRecipes, expected, layouts, limit, tensors
from reference.all_reduce_traffic import alternatives, elements, loads, needed
from reference.layout import window
from reference.mesh import Mesh
from reference.recipe import Recipe
from reference.traffic import Load
from strategies.all_reduce import FEATURES, cases, simpler, within
from strategies.scope import Scope

FULL = Scope(max_world=8, parts=frozenset(["all_reduce"]), features=frozenset(FEATURES))
TP = Mesh.of(tp=2)
everything = cases(FULL)


def held(case: AllReduceCase, role: str, tensor: torch.Tensor) -> list[np.ndarray]:
    layout = layouts(case)[role]
    return [window(tensor.shape, layout, case.mesh, rank).take(tensor.numpy()) for rank in range(case.mesh.size)]


def by_hand(case: AllReduceCase, parts: list[np.ndarray], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """What a rank has afterwards, and the sum of the magnitudes that went into it."""
    ranks = [int(r) for r in case.mesh.group_of(rank, case.axis)]
    mine = [parts[r] for r in ranks]
    if case.operation == "all_gather":
        joined = np.concatenate(mine)
        return joined, np.zeros_like(joined)
    with np.errstate(invalid="ignore", over="ignore"):
        found = {"sum": np.sum, "avg": np.mean, "max": np.max, "min": np.min}[case.reduction](mine, axis=0)
        magnitude = np.sum(np.abs(mine), axis=0)
    if case.operation == "reduce_scatter":
        pieces = [np.array_split(x.ravel(), len(ranks))[ranks.index(rank)] for x in (found, magnitude)]
        return pieces[0], pieces[1]
    return found, magnitude


@given(everything)
def test_expected_is_what_the_ranks_compute(case: AllReduceCase) -> None:
    given_tensors = tensors(case)
    for (name, value), entered in zip(expected(case, given_tensors).items(), given_tensors.values(), strict=True):
        assert value is not None
        parts = held(case, "input", entered)
        for rank, got in enumerate(held(case, "output", value)):
            right, magnitude = by_hand(case, parts, rank)
            if case.exact:
                # A last rounding to the dtype, which nothing but sums in fp32 need.
                right = torch.from_numpy(right.copy()).to(case.format.torch_dtype).to(torch.float64).numpy()
                np.testing.assert_array_equal(got, right, err_msg=name)
            else:
                # Two float64 sums of n terms and a division: Higham, Accuracy and Stability of Numerical Algorithms,
                # 2nd ed., section 4.2.
                bound = 2 * (case.parallel_size + 1) * 2.0**-53 * np.nan_to_num(magnitude, posinf=0.0)
                with np.errstate(invalid="ignore"):
                    off = np.where((got == right) | (np.isnan(got) & np.isnan(right)), 0.0, np.abs(got - right))
                assert (off <= bound).all(), (name, got, right)


@given(everything)
def test_lattice_data_is_exact_in_any_order(case: AllReduceCase) -> None:
    if case.recipes.input.kind == "lattice" and case.exact and case.reduction in ("sum", "avg"):
        most = 2**case.kept.precision
        assert limit(case) * case.parallel_size <= most or case.operation == "all_gather"
        for tensor in tensors(case).values():
            finite = tensor[tensor.isfinite()]
            assert (finite == finite.to(case.format.torch_dtype)).all()


@given(everything)
def test_what_is_drawn_is_within_the_scope_and_so_is_what_is_simpler(case: AllReduceCase) -> None:
    assert within(case, FULL)
    assert case.mesh.size <= FULL.max_world
    for simple in itertools.islice(simpler(case, FULL), 5):
        assert within(simple, FULL)
        assert simple != case


@given(st.data(), st.sets(st.sampled_from(sorted(FEATURES))))
def test_a_narrow_scope_is_kept(data: st.DataObject, features: set[str]) -> None:
    narrow = dataclasses.replace(FULL, features=frozenset(features), dtypes=("fp32",))
    case = data.draw(cases(narrow))
    assert within(case, narrow)
    for feature in set(FEATURES) - features:
        # A scope that lacks the one feature does not have the case that needs it.
        assert not uses(case, feature) or feature == "all_reduce_library"


def uses(case: AllReduceCase, feature: str) -> bool:
    pieces = case.operation != "all_reduce"
    return {
        **{f"all_reduce_{name}": case.algorithm == name for name in ("library", "ring", "halving_doubling", "tree")},
        "all_reduce_parameter_server": case.algorithm == "parameter_server",
        "all_reduce_pieces": pieces,
        "all_reduce_uneven_pieces": pieces and any(not k or k % case.parallel_size for k in case.lengths),
        "all_reduce_average": case.reduction == "avg",
        "all_reduce_extremes": case.reduction in ("max", "min"),
        "all_reduce_propagates_nan": case.reduction in ("max", "min") and case.recipes.input.inject == "nan",
        "all_reduce_fp32_accumulation": case.accumulate_fp32,
        "all_reduce_any_strides": case.transposed,
        "all_reduce_in_place": case.in_place,
        "all_reduce_handles": case.calls == "handles",
        "all_reduce_empty": 0 in case.lengths,
        "all_reduce_refuses": bool(case.invalid) or not case.check,
        "all_reduce_any_axis": case.axis != "tp",
    }[feature]


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_drawn(feature: str) -> None:
    assert any(uses(case, feature) and case.parallel_size > 1 for case in sample(everything))


def test_what_rounds_is_not_exact() -> None:
    normal = AllReduceRecipes(Recipe("normal"))
    assert AllReduceCase(TP).exact
    assert not AllReduceCase(TP, recipes=normal).exact
    assert AllReduceCase(TP, reduction="max", recipes=normal).exact
    assert AllReduceCase(TP, operation="all_gather", recipes=normal).exact
    assert AllReduceCase(TP, reduction="avg").exact
    assert not AllReduceCase(Mesh.of(tp=3), reduction="avg").exact, "a third rounds"


def test_sums_in_fp32_round_once() -> None:
    case = AllReduceCase(Mesh.of(tp=3), shapes=((50,),), dtype="bf16", accumulate_fp32=True)
    assert case.kept.name == "fp32"
    assert limit(case) == 256
    (want,) = expected(case, tensors(case)).values()
    (given_tensor,) = tensors(case).values()
    assert want is not None
    assert torch.equal(want, given_tensor.sum(0).bfloat16().double()[None])
    assert not torch.equal(want[0], given_tensor.sum(0)), "a last rounding"
    assert AllReduceCase(TP, dtype="fp64", accumulate_fp32=True).kept.name == "fp64"
    assert AllReduceCase(TP, dtype="bf16", reduction="max", accumulate_fp32=True).kept.name == "bf16"


def test_a_ring_may_turn_its_pieces_round() -> None:
    """The textbook's rank r sends its own piece first, and ends with the sum of the next: 4 elements on 3 ranks, the
    first piece the longer one."""
    case = AllReduceCase(Mesh.of(tp=3), algorithm="ring", shapes=((4,),))
    assert alternatives(case)[0] == loads(case)
    # Each rank sends two pieces, then two finished ones: all but the piece it ends with, and all but the next one.
    sizes = [2, 1, 1]
    for shift, found in enumerate(alternatives(case)):
        sent = [4 * (2 * 4 - sizes[(r + shift) % 3] - sizes[(r + shift + 1) % 3]) for r in range(3)]
        assert [one.sent for one in found] == sent
        assert sum(one.sent for one in found) == sum(one.received for one in found)
    assert len(set(alternatives(case))) == 3
    for fixed in ({"operation": "reduce_scatter"}, {"operation": "all_gather"}, {"algorithm": "tree"}):
        assert len(alternatives(dataclasses.replace(case, **fixed))) == 1  # type: ignore[arg-type]


def test_the_bytes_of_the_contract() -> None:
    """2 (n - 1)/n S around a ring, 2 (n - 1) S at a server's link."""
    for n in (2, 4, 8, 16):
        size = 4 * 32
        ring = loads(AllReduceCase(Mesh.of(tp=n), algorithm="ring", shapes=((32,),)))
        assert set(ring) == {Load(2 * (n - 1) * size // n, 2 * (n - 1) * size // n)}
        assert loads(AllReduceCase(Mesh.of(tp=n), algorithm="halving_doubling", shapes=((32,),))) == ring
        server, *workers = loads(AllReduceCase(Mesh.of(tp=n), algorithm="parameter_server", shapes=((32,),)))
        assert server.sent + server.received == 2 * (n - 1) * size
        assert set(workers) == {Load(size, size)}
        tree = loads(AllReduceCase(Mesh.of(tp=n), algorithm="tree", shapes=((32,),)))
        assert tree[0] == Load(int(math.log2(n)) * size, int(math.log2(n)) * size)
        assert tree[-1] == Load(size, size)


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "tree", "parameter_server"])
def test_what_is_sent_is_received(algorithm: str) -> None:
    for n, length in itertools.product(range(1, 17), range(20)):
        for kind in zip(*elements(algorithm, length, n), strict=True):  # type: ignore[arg-type]
            assert sum(one.sent for one in kind) == sum(one.received for one in kind)


def test_sums_in_fp32_travel_in_four_bytes_and_results_in_two() -> None:
    case = AllReduceCase(TP, algorithm="ring", shapes=((8,),), dtype="bf16")
    assert loads(case)[0] == Load(16, 16)
    assert loads(dataclasses.replace(case, accumulate_fp32=True))[0] == Load(24, 24)
    assert loads(dataclasses.replace(case, operation="reduce_scatter", accumulate_fp32=True))[0] == Load(16, 16)
    assert loads(dataclasses.replace(case, operation="all_gather"))[0] == Load(8, 8)


def test_a_library_does_one_collective_a_tensor() -> None:
    case = AllReduceCase(TP, shapes=((3,), (4, 2)))
    assert [(one.operation, one.elements) for one in needed(case)] == [("all_reduce", 3), ("all_reduce", 8)]
    assert set(loads(case)) == {Load(0, 0)}
    assert [one.elements for one in needed(dataclasses.replace(case, operation="all_gather"))] == [2, 4]
    assert needed(dataclasses.replace(case, algorithm="ring")) == ()
    assert needed(AllReduceCase(Mesh.of(tp=1, dp=2))) == ()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"operation": "broadcast"}, "operation is 'broadcast': expected one of 'all_reduce'"),
        ({"algorithm": "star"}, "algorithm is 'star'"),
        ({"reduction": "median"}, "reduction is 'median'"),
        ({"calls": "often"}, "calls is 'often'"),
        ({"invalid": "bad"}, "invalid is 'bad'"),
        ({"axis": "pp"}, "axis 'pp' is not in the mesh"),
        ({"shapes": ()}, "expected one or more"),
        ({"shapes": ((2, -1),)}, "dimensions of at least 0"),
        ({"dtype": "fp8"}, "fp8"),
        ({"operation": "all_gather", "algorithm": "tree"}, "expected by a ring or library"),
        ({"operation": "reduce_scatter", "in_place": True}, "into new tensors"),
        ({"operation": "all_gather", "reduction": "max"}, "reduces nothing"),
        ({"invalid": "length", "check": False}, "expected a checked all_reduce"),
        ({"invalid": "order"}, "expected two of different lengths"),
        ({"invalid": "number", "calls": "handles"}, "a call that a rank does not make"),
    ],
)
def test_what_is_no_case_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        AllReduceCase(**{"mesh": TP, **changes})  # type: ignore[arg-type]
