"""The groups of the shipped candidates, on paper and on real ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import cases, check


@pytest.mark.parametrize("candidate", ["builtin", "torch", "megatron-core"])
@given(data=st.data())
def test_groups_hold_the_ranks_of_the_mesh(candidate: str, data: st.DataObject) -> None:
    check("mesh", candidate, data.draw(cases("mesh", candidate)))


def test_groups_created_in_different_orders_are_found() -> None:
    from harness.verification import verify

    done = verify("builtin+F01", subjects=["mesh"], examples=100, seed=1, save=None)
    (row,) = done.rows
    assert row.result == "fault"
    assert row.failures[0].reproducer.case.mesh.size == 2
