"""Differentiable collectives of the shipped candidates, on real ranks, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import cases, check, verify
from harness.bench import Bench
from harness.properties.collectives import COLLECTIVES
from reference.collectives import CollectivesCase
from reference.mesh import Mesh


@pytest.mark.parametrize("candidate", ["builtin", "torch", "megatron-core"])
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
    done = verify(f"builtin+{mutant}", subjects=["collectives"], examples=200, seed=2, save=None)
    (row,) = done.rows
    assert row.result == "fault", f"{mutant} was not found in {row.examples} examples"
    case = row.failures[0].reproducer.case
    assert case.mesh.size <= 2, case
    assert max(map(sum, case.shapes)) <= 4, case
    found = [finding for failure in row.failures for finding in failure.verdict.findings]
    assert any(CAUSES[mutant] in f"{finding.message} {finding.cause} {finding.details}" for finding in found), found


def test_a_copy_whose_gradient_is_not_summed_is_found() -> None:
    """The adapter of torch, with ``to_local`` not told that its gradient is partial."""
    case = CollectivesCase(Mesh.of(tp=2), "copy", ((2, 2),))
    with Bench("torch") as right:
        assert right.check(COLLECTIVES, case).verdict.holds
    with Bench(f"{Path(__file__).parent / 'faulty_adapters.py'}:TorchCopyUnsummed") as wrong:
        found = wrong.check(COLLECTIVES, case).verdict.findings
    assert any(finding.tensor == "input[0].grad" for finding in found), found
