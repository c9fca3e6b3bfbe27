"""Column and row linear layers of the shipped candidates, on real ranks, against one process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import cases, check, verify
from harness.bench import Bench
from harness.properties.linear import LINEAR
from reference.linear import LinearCase
from reference.mesh import Mesh


@pytest.mark.parametrize("candidate", ["builtin", "torch", "megatron-core"])
@given(data=st.data())
def test_linear_layers_compute_what_one_process_computes(candidate: str, data: st.DataObject) -> None:
    check("linear", candidate, data.draw(cases("linear", candidate)))


@pytest.mark.parametrize("frozen", [(), ("weight",), ("bias",)])
def test_megatron_reduces_an_unwanted_gradient_where_the_layer_itself_trains(
    frozen: tuple[str, ...],
) -> None:
    """A bias that the caller adds sends nothing through the layer."""
    pytest.importorskip("megatron.core")
    trains = {f"{name}_requires_grad": name not in frozen for name in ("weight", "bias")}
    case = LinearCase(Mesh.of(tp=2), "column", 1, 2, bias=True, skip_bias_add=True, input_requires_grad=False, **trains)
    with Bench("megatron-core") as made:
        assert made.check(LINEAR, case).verdict.holds


#: Words of the cause that the failing run names.
CAUSES = {
    "F03": "over tp",
    "F04": "has the bias",
    "F05": "the bias is divided by the size of",
    "F06": "reduces a contiguous copy and returns the original",
    "F11": "gathered along the first dimension and viewed",
    "F12": "times too large: the backward of the gather sums",
    "F13": "the slice of weight.initial that belongs to rank 0",
    "F14": "an all-reduce is missing in backward",
}


@pytest.mark.parametrize("mutant", CAUSES)
def test_a_planted_fault_is_found(mutant: str) -> None:
    done = verify(f"builtin+{mutant}", subjects=["linear"], examples=100, seed=1, save=None)
    (row,) = done.rows
    assert row.result == "fault", f"{mutant} was not found in {row.examples} examples"
    case = row.failures[0].reproducer.case
    assert case.mesh.size <= 2, case
    assert max(case.in_features, case.out_features) <= 4, case
    found = [finding for failure in row.failures for finding in failure.verdict.findings]
    assert any(CAUSES[mutant] in f"{finding.message} {finding.cause} {finding.details}" for finding in found), found
