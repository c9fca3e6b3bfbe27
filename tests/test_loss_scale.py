"""Loss scalers of the shipped candidates on real ranks, against the transition function."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import cases, check, verify


@pytest.mark.parametrize("candidate", ["builtin", "torch", "megatron-core"])
@settings(max_examples=6)
@given(data=st.data())
def test_scales_are_those_of_the_transition_function(candidate: str, data: st.DataObject) -> None:
    if candidate.startswith("megatron"):
        pytest.importorskip("megatron.core")
    check("loss_scale", candidate, data.draw(cases("loss_scale", candidate, max_world=2)))


#: Words of a finding's message that the failing run has. Most others the state machine finds.
SAID = {
    "F27": "after event 0 (load)",
    "F29e": "no traffic where some is needed",
}


@pytest.mark.parametrize("mutant", SAID)
def test_a_planted_fault_is_found(mutant: str) -> None:
    done = verify(f"builtin+{mutant}", subjects=["loss_scale"], examples=200, seed=1, save=None)
    (row,) = done.rows
    assert row.result == "fault", f"{mutant} was not found in {row.examples} examples"
    shrunk = [failure.reproducer.case for failure in row.failures]
    assert all(case.mesh.size <= 2 and len(case.events) <= 3 for case in shrunk), shrunk
    found = [finding.message for failure in row.failures for finding in failure.verdict.findings]
    assert any(SAID[mutant] in message for message in found), found
