"""Sharded optimizers of the shipped candidates, on real ranks, against one process with the reduced gradient."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import cases, check, verify


@pytest.mark.parametrize("candidate", ["builtin", "torch"])
@given(data=st.data())
def test_steps_are_those_of_one_process(candidate: str, data: st.DataObject) -> None:
    check("sharded_optimizer", candidate, data.draw(cases("sharded_optimizer", candidate)))


#: Words of a finding's message, cause or details that the failing run has.
SAID = {
    "F53": "has no owner among the ranks",
    "F54": "differs from one process",
    "F55": "is as if gradients were averaged twice",
    "F56": "differs from one process",
    "F57": "differs from one process",
    "F58": "is as before the first step: it is not updated",
    "F59": "after saving and loading at step",
}


@pytest.mark.parametrize("mutant", SAID)
def test_a_planted_fault_is_found(mutant: str) -> None:
    done = verify(f"builtin+{mutant}", subjects=["sharded_optimizer"], examples=200, seed=1, save=None)
    (row,) = done.rows
    assert row.result == "fault", f"{mutant} was not found in {row.examples} examples"
    shrunk = [failure.reproducer.case for failure in row.failures]
    assert all(case.mesh.size <= 2 and len(case.parameters) <= 2 for case in shrunk), shrunk
    found = [finding for failure in row.failures for finding in failure.verdict.findings]
    assert any(SAID[mutant] in f"{finding.message} {finding.cause} {finding.details}" for finding in found), found
