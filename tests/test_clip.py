"""Clipping by the shipped candidates, on real ranks, against one process."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import cases, check, verify


@pytest.mark.parametrize("candidate", ["builtin", "torch", "megatron-core"])
@settings(max_examples=6)
@given(data=st.data())
def test_norms_and_gradients_are_those_of_one_process(candidate: str, data: st.DataObject) -> None:
    if candidate.startswith("megatron"):
        pytest.importorskip("megatron.core")
    check("clip", candidate, data.draw(cases("clip", candidate, max_world=2)))


#: Words of a finding's message or cause that the failing run has.
SAID = {
    "F32": "as if parameters that all tp ranks hold were counted on each",
    "F37": "as if nothing were clipped",
}


@pytest.mark.parametrize("mutant", SAID)
def test_a_planted_fault_is_found(mutant: str) -> None:
    done = verify(f"builtin+{mutant}", subjects=["clip"], examples=200, seed=1, save=None)
    (row,) = done.rows
    assert row.result == "fault", f"{mutant} was not found in {row.examples} examples"
    shrunk = [failure.reproducer.case for failure in row.failures]
    assert all(case.mesh.size <= 2 and len(case.parameters) <= 2 for case in shrunk), shrunk
    found = [finding for failure in row.failures for finding in failure.verdict.findings]
    assert any(SAID[mutant] in f"{finding.message} {finding.cause} {finding.details}" for finding in found), found
