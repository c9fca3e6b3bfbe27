"""Pipelines of the shipped candidates, on real ranks, against one process on the whole batch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import cases, check, verify


@pytest.mark.parametrize(("candidate", "most"), [("builtin", 4), ("torch", 4), ("megatron-core", 2)])
@settings(max_examples=8)
@given(data=st.data())
def test_gradients_are_those_of_one_process(candidate: str, most: int, data: st.DataObject) -> None:
    if candidate == "megatron-core":
        pytest.importorskip("megatron.core")
    check("pipeline", candidate, data.draw(cases("pipeline", candidate, max_world=most)))


def test_a_planted_fault_is_found() -> None:
    """The others are in tests/test_sharded_pipeline.py and tests/harness/test_pipelining.py: to shrink them all would
    take minutes."""
    done = verify("builtin+F64", subjects=["pipeline"], examples=30, seed=1, save=None, max_world=2)
    (row,) = done.rows
    assert row.result == "fault", f"not found in {row.examples} examples"
    (failure,) = row.failures
    assert failure.reproducer.case.loss == "token_mean"
    assert failure.reproducer.case.micro_batches == 2
