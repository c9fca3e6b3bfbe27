"""Data parallelism of the shipped candidates, on real ranks, against one process on the whole batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import cases, check, verify

FSDP = "harness.candidates.torch_fsdp:TorchFsdp"


@pytest.mark.parametrize("candidate", ["builtin", "torch", FSDP, "megatron-core"])
@given(data=st.data())
def test_gradients_are_those_of_one_process(candidate: str, data: st.DataObject) -> None:
    if candidate == "megatron-core":
        pytest.importorskip("megatron.core")
    check("data_parallel", candidate, data.draw(cases("data_parallel", candidate)))


#: Words of the cause, or of the message, that the failing run names.
CAUSES = {
    "F39": "has the reduced gradient of the last micro-batch, and the rank's own of those before",
    "F40": "is the rank's own: it is not reduced over",
    "F41": "is the mean of the ranks' means, and not the mean over all tokens",
    "F42": "has NaN where a finite value is due",
    "F43": "is that of the last micro-batch alone: the others are not accumulated",
    "F44": "gradients are reduced in bfloat16 in step 0, micro-batch 0, where float32 is asked",
}


@pytest.mark.parametrize("mutant", CAUSES)
def test_a_planted_fault_is_found(mutant: str) -> None:
    """With every seed. A smallest case may fit several causes, so that none is told: one seed of three tells it."""
    told = []
    for seed in (1, 2, 3):
        done = verify(f"builtin+{mutant}", subjects=["data_parallel"], examples=200, seed=seed, save=None)
        (row,) = done.rows
        assert row.result == "fault", f"{mutant} was not found in {row.examples} examples"
        shrunk = [failure.reproducer.case for failure in row.failures]
        assert all(case.mesh.size <= 2 for case in shrunk), shrunk
        assert min(len(case.layers) for case in shrunk) <= 2, shrunk
        found = [finding for failure in row.failures for finding in failure.verdict.findings]
        told += [f"{finding.message} {finding.cause} {finding.details}" for finding in found]
        if any(CAUSES[mutant] in one for one in told):
            return
    raise AssertionError(told)
