"""Comparison within a computed tolerance, from both sides: right results in low precision hold, planted faults fail."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.observation import LocalTensor, Observation
from harness.oracle.expectation import expect
from harness.oracle.statistics import Expected
from harness.oracle.within import Judged, Limits, compare_within
from harness.verdict import Finding
from reference.dtypes import FORMATS
from reference.layout import Layout, Partial, Split, Whole, window
from reference.mesh import Mesh
from reference.recipe import Recipe, fill

TOKENS, INSIDE, OUTSIDE = 32, 48, 32
Given = tuple[torch.Tensor, torch.Tensor]


def given_tensors(dtype: str, kind: str, seed: int = 0) -> Given:
    shapes = {"x": (TOKENS, INSIDE), "w": (OUTSIDE, INSIDE)}
    x, w = (fill(Recipe(kind, seed), name, shape, FORMATS[dtype], 4) for name, shape in shapes.items())
    return x, w


def expected_of(dtype: str, tensors: Given) -> Expected:
    x, w = tensors
    found = expect(lambda: {"y": x @ w.T}, FORMATS[dtype])["y"]
    assert found is not None
    return found


def in_parts(dtype: str, tensors: Given, n: int) -> torch.Tensor:
    """The product in the dtype, summed over n parts of the contraction: a row layer without its ranks."""
    x, w = (t.to(FORMATS[dtype].torch_dtype) for t in tensors)
    products = [a @ b.T for a, b in zip(x.chunk(n, 1), w.chunk(n, 1), strict=True)]
    total = products[0]
    for product in products[1:]:
        total = total + product
    return total.to(torch.float64)


def judged(expected: Expected, got: torch.Tensor, layout: Layout = (), mesh: Mesh | None = None) -> Judged:
    mesh = mesh or Mesh.of(tp=1)
    observed = []
    for rank in range(mesh.size):
        values = window(tuple(got.shape), layout, mesh, rank).take(got).numpy()
        observed.append(Observation({"y": LocalTensor(values.copy(), "float32", "cpu")}))
    return compare_within("y", expected, layout, "float32", mesh, observed)


@given(
    st.sampled_from(list(FORMATS)),
    st.sampled_from(["normal", "uniform", "spiky", "cancelling", "lattice"]),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(0, 99),
)
def test_what_only_rounds_holds(dtype: str, kind: str, n: int, seed: int) -> None:
    tensors = given_tensors(dtype, kind, seed)
    found = judged(expected_of(dtype, tensors), in_parts(dtype, tensors, n))
    assert found.finding is None, (found.worst, found.slope)


#: A uniform factor in a tensor of 1,024 elements, far below what shows in any one element.
FACTORS = {"fp64": 2.0**-45, "fp32": 2.0**-16, "fp16": 2.0**-7, "bf16": 2.0**-5}


def put(y: torch.Tensor, row: int, column: int, value: float) -> torch.Tensor:
    changed = y.clone()
    changed[row, column] = value
    return changed


FAULTS: dict[str, Callable[[str, torch.Tensor, Given, Expected], torch.Tensor]] = {
    "a part of the sum is dropped": lambda dtype, y, xw, _: y - in_parts(dtype, (xw[0][:, -6:], xw[1][:, -6:]), 1),
    "two rows are swapped": lambda dtype, y, *_: y[[1, 0, *range(2, TOKENS)]],
    "one element is off by 64 tolerances": lambda dtype, y, _, e: put(y, 3, 5, y[3, 5] + 64 * e.tolerance[3, 5]),
    "one element is NaN": lambda dtype, y, *_: put(y, 0, 0, torch.nan),
    "one element is infinite": lambda dtype, y, *_: put(y, 9, 9, torch.inf),
    "a factor": lambda dtype, y, *_: y * (1 + FACTORS[dtype]),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", ["normal", "uniform", "spiky"])
def test_a_planted_fault_is_found(dtype: str, kind: str, fault: str) -> None:
    tensors = given_tensors(dtype, kind)
    expected, right = expected_of(dtype, tensors), in_parts(dtype, tensors, 2)
    assert judged(expected, right).finding is None
    wrong = FAULTS[fault](dtype, right, tensors, expected).to(FORMATS[dtype].torch_dtype).to(torch.float64)
    finding = judged(expected, wrong).finding
    assert finding is not None
    assert finding.kind == "mismatch"


def found_in(expected: Expected, got: torch.Tensor, layout: Layout, mesh: Mesh) -> Finding:
    finding = judged(expected, got, layout, mesh).finding
    assert finding is not None
    return finding


def test_the_finding_says_where_and_how_far() -> None:
    tensors = given_tensors("fp32", "normal")
    expected, got = expected_of("fp32", tensors), in_parts("fp32", tensors, 2)
    got[20, 7] += 1
    finding = found_in(expected, got, Split(0, "tp"), Mesh.of(tp=2))
    assert finding.message == "y differs from one process on rank 1: 1 of 1024 elements"
    assert (finding.rank, finding.index, finding.local_index) == (1, (20, 7), (4, 7))
    assert finding.got == float(got[20, 7])
    assert finding.tolerance == Limits().worst * expected.tolerance[20, 7]


def test_a_slope_on_one_rank_is_found_there() -> None:
    tensors = given_tensors("fp16", "normal")
    expected, got = expected_of("fp16", tensors), in_parts("fp16", tensors, 2)
    got[TOKENS // 2 :] *= 1 + 2.0**-8
    finding = found_in(expected, got, Split(0, "tp"), Mesh.of(tp=2))
    assert finding.rank == 1
    assert finding.message.startswith("y is 1.003")
    assert "on rank 1 (tp=1): every element is within its tolerance" in finding.message


def test_parts_of_a_sum_are_judged_as_their_sum() -> None:
    tensors = given_tensors("fp32", "normal")
    expected, mesh = expected_of("fp32", tensors), Mesh.of(tp=2)
    parts = [in_parts("fp32", (tensors[0][:, half], tensors[1][:, half]), 1) for half in (slice(0, 24), slice(24, 48))]
    observed = [Observation({"y": LocalTensor(part.numpy(), "float32", "cpu")}) for part in parts]
    assert compare_within("y", expected, Partial("tp"), "float32", mesh, observed).finding is None
    assert compare_within("y", expected, Whole(), "float32", mesh, observed).finding is not None


@pytest.mark.parametrize("injected", ["inf", "-inf", "nan"])
def test_what_is_not_finite_must_be_so_in_place(injected: str) -> None:
    x, w = given_tensors("bf16", "normal")
    x[3, 4] = float(injected)
    expected, got = expected_of("bf16", (x, w)), in_parts("bf16", (x, w), 2)
    assert judged(expected, got).finding is None
    assert not got[3].isfinite().any()
    for wrong in (got.nan_to_num(), torch.cat([got[1:], got[:1]])):
        assert judged(expected, wrong).finding is not None


def test_a_sum_that_may_overflow_is_left_open_and_others_are_not() -> None:
    """Two large terms cancel: on two ranks each overflows alone."""
    x = torch.full((2, 2), 60000.0, dtype=torch.float64)
    x[1] = 1.0
    w = torch.tensor([[2.0, -2.0]], dtype=torch.float64)
    expected = expected_of("fp16", (x, w))
    assert expected.ambiguous.tolist() == [[True], [False]]
    for value in (0.0, torch.nan, torch.inf):
        assert judged(expected, torch.tensor([[value], [0.0]], dtype=torch.float64)).finding is None
        if value:
            assert judged(expected, torch.tensor([[0.0], [value]], dtype=torch.float64)).finding is not None


def test_numbers_that_round_to_zero_lean_the_same_way_and_hold() -> None:
    tensors = given_tensors("fp16", "subnormal")
    tensors = tensors[0], tensors[1] * 2.0**12
    expected = expected_of("fp16", tensors)
    got = in_parts("fp16", tensors, 2)
    assert np.any(got.numpy() == 0)
    assert judged(expected, got).finding is None


def test_what_does_not_round_must_be_exact() -> None:
    x = torch.arange(6, dtype=torch.float64)
    expected = expect(lambda: {"y": x.flip(0), "none": None}, FORMATS["bf16"])
    assert expected["none"] is None
    y = expected["y"]
    assert y is not None
    assert judged(y, x.flip(0)).finding is None
    assert judged(y, x.flip(0) + 2.0**-20).finding is not None
    missing = [Observation({})]
    assert compare_within("y", y, Whole(), "float32", Mesh.of(tp=1), missing).finding is not None
    extra = [Observation({"none": LocalTensor(np.zeros(1), "float32", "cpu")})]
    assert compare_within("none", None, Whole(), "float32", Mesh.of(tp=1), extra).finding is not None
