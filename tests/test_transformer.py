"""The transformer layer of the shipped candidate, on real ranks, against one process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import cases as drawn
from harness import check, verify


@given(data=st.data())
def test_transformer_layers_compute_what_one_process_computes(data: st.DataObject) -> None:
    check("transformer", "builtin", data.draw(drawn("transformer", "builtin")))


#: Words of the cause that the failing run names.
CAUSES = {
    "F04": "has the bias after attention and of the mlp 2 times",
    "F07": "covers only the rank's own tokens: the sum over tp after the last backward is missing",
    "F08": "is averaged over tp where a sum is due: 1/2 of what it should be",
    "F09": "covers only the rank's own heads: the sum over tp after the last backward is missing",
    "F10": "lacks the other ranks' part of the gradient into the key/value heads that several ranks hold",
    "F13": "every shard was initialised from the same seed",
    "F14": "lacks the other ranks' part of the gradient into the mlp: an all-reduce over tp is missing in backward",
    "F48": "recomputation draws other dropout masks than forward did",
    "F47": "the same on rank 0 (tp=0) and rank 1 (tp=1): as if the random stream of each rank were never entered",
}


@pytest.mark.parametrize("mutant", CAUSES)
def test_a_planted_fault_is_found(mutant: str) -> None:
    done = verify(f"builtin+{mutant}", subjects=["transformer"], examples=200, seed=1, max_world=4, save=None)
    (row,) = done.rows
    assert row.result == "fault", f"{mutant} was not found in {row.examples} examples"
    cases = [failure.reproducer.case for failure in row.failures]
    assert all(case.mesh.size <= 2 for case in cases), cases
    # Replicas that disagree within the tolerance need a low precision, and some values, to be seen alone.
    assert min(max(case.hidden, case.ffn) for case in cases) <= 8, cases
    found = [finding for failure in row.failures for finding in failure.verdict.findings]
    assert any(CAUSES[mutant] in f"{finding.message} {finding.cause} {finding.details}" for finding in found), found
