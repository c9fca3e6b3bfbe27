"""Differentiable collectives of the shipped candidates, on real ranks, against one process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import cases, check, verify


@pytest.mark.parametrize("candidate", ["builtin", "megatron-core"])
@given(data=st.data())
def test_collectives_compute_what_one_process_computes(candidate: str, data: st.DataObject) -> None:
    check("collectives", candidate, data.draw(cases("collectives", candidate)))


#: Words of the cause that the failing run names.
CAUSES = {
    "F06": "equals the rank's own part before the sum over",
    "F12": "times too large: backward sums over",
    "F51": "times too large: backward sums over",
}


@pytest.mark.parametrize("mutant", CAUSES)
def test_a_planted_fault_is_found(mutant: str) -> None:
    done = verify(f"builtin+{mutant}", subjects=["collectives"], examples=200, seed=1, save=None)
    (row,) = done.rows
    assert row.result == "fault", f"{mutant} was not found in {row.examples} examples"
    case = row.failures[0].reproducer.case
    assert case.mesh.size <= 2, case
    assert max(map(sum, case.shapes)) <= 4, case
    found = [finding for failure in row.failures for finding in failure.verdict.findings]
    assert any(CAUSES[mutant] in f"{finding.message} {finding.cause} {finding.details}" for finding in found), found
