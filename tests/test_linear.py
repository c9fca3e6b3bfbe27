"""Column and row linear layers of the shipped candidates, on real ranks, against one process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import cases, check


@pytest.mark.parametrize("candidate", ["builtin", "torch", "megatron-core"])
@given(data=st.data())
def test_linear_layers_compute_what_one_process_computes(candidate: str, data: st.DataObject) -> None:
    check("linear", candidate, data.draw(cases("linear", candidate)))


@pytest.mark.parametrize("mutant", ["F03", "F04", "F05", "F06", "F11", "F12", "F13", "F14"])
def test_a_planted_fault_is_found(mutant: str) -> None:
    from harness.verification import verify

    done = verify(f"builtin+{mutant}", subjects=["linear"], examples=100, seed=1, save=None)
    (row,) = done.rows
    assert row.result == "fault", f"{mutant} was not found in {row.examples} examples"
    case = row.failures[0].reproducer.case
    assert case.mesh.size <= 2, case
    assert max(case.in_features, case.out_features) <= 4, case
