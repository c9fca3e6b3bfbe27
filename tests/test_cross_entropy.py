"""Vocabulary-parallel cross entropy of the shipped candidates, on real ranks, against one process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import cases, check, verify


@pytest.mark.parametrize("candidate", ["builtin", "torch", "megatron-core"])
@given(data=st.data())
def test_losses_are_what_one_process_computes(candidate: str, data: st.DataObject) -> None:
    check("cross_entropy", candidate, data.draw(cases("cross_entropy", candidate)))


#: Words of the cause that the failing run names; F18 gives the right loss, and the logits are no more what they were.
CAUSES = {
    "F15": "with the mean of the rank's own logits",
    "F16": "smooths labels with the width of the rank's own columns, and not with the vocabulary's, in backward",
    "F17": "is log(tp) too large",
    "F18": "changed logits[0] in place",
    "F20": "is a mean over all tokens, the ignored ones too",
    "F21": "another maximum subtracted on each rank",
    "F22": "they are not masked",
}


@pytest.mark.parametrize("mutant", CAUSES)
def test_a_planted_fault_is_found(mutant: str) -> None:
    done = verify(f"builtin+{mutant}", subjects=["cross_entropy"], examples=200, seed=1, save=None)
    (row,) = done.rows
    assert row.result == "fault", f"{mutant} was not found in {row.examples} examples"
    case = row.failures[0].reproducer.case
    assert case.mesh.size <= 2, case
    assert case.width <= 4, case
    found = [finding for failure in row.failures for finding in failure.verdict.findings]
    assert any(CAUSES[mutant] in f"{finding.message} {finding.cause} {finding.details}" for finding in found), found
