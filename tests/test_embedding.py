"""The vocabulary-parallel embedding of the shipped candidates, on real ranks, against one process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import cases, check, verify


@pytest.mark.parametrize("candidate", ["builtin", "torch", "megatron-core"])
@given(data=st.data())
def test_embeddings_compute_what_one_process_computes(candidate: str, data: st.DataObject) -> None:
    check("embedding", candidate, data.draw(cases("embedding", candidate)))


#: Words of the cause that the failing run names.
CAUSES = {
    "F13": "the slice of weight.initial that belongs to rank 0",
    "F19": "the global index is applied to each shard",
    "F23": "the vocabulary is split by floor",
}


@pytest.mark.parametrize("mutant", CAUSES)
def test_a_planted_fault_is_found(mutant: str) -> None:
    done = verify(f"builtin+{mutant}", subjects=["embedding"], examples=200, seed=1, save=None)
    (row,) = done.rows
    assert row.result == "fault", f"{mutant} was not found in {row.examples} examples"
    case = row.failures[0].reproducer.case
    assert case.mesh.size <= 2, case
    assert max(case.rows, case.hidden) <= 4, case
    found = [finding for failure in row.failures for finding in failure.verdict.findings]
    assert any(CAUSES[mutant] in f"{finding.message} {finding.cause} {finding.details}" for finding in found), found
