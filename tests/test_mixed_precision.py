"""Mixed-precision optimizers of the shipped candidates, on real ranks, against one process."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import Mesh, cases, check, verify
from harness.bench import Bench
from harness.properties import property_of
from reference.mixed_precision import MixedPrecisionCase, MixedPrecisionRecipes
from reference.mixed_precision_parts import MixedParameter, Overflow
from reference.mixed_precision_steps import plan, tensors
from reference.recipe import Recipe


@pytest.mark.parametrize("candidate", ["builtin", "torch", "megatron-core"])
@settings(max_examples=8)
@given(data=st.data())
def test_steps_are_those_of_one_process(candidate: str, data: st.DataObject) -> None:
    if candidate.startswith("megatron"):
        pytest.importorskip("megatron.core")
    check("mixed_precision", candidate, data.draw(cases("mixed_precision", candidate, max_world=2)))


EIGHT = Mesh.of(tp=2, pp=2, dp=2)


@pytest.mark.parametrize("sharded", [False, True])
def test_an_overflow_on_any_one_of_eight_ranks_skips_the_step_on_all(sharded: bool) -> None:
    """One step for each rank, and a good one; the verdict compares the decision, and every bit, on all of them."""
    case = MixedPrecisionCase(
        EIGHT,
        (MixedParameter(4, split=True), MixedParameter(3, stage=1), MixedParameter(2, tied=True)),
        dtype="bf16",
        momentum=0.5,
        sharded=sharded,
        steps=9,
        overflows=tuple(Overflow(rank, "inf" if rank % 2 else "nan", EIGHT.names, rank) for rank in range(8)),
    )
    assert [one.skipped for one in plan(case, tensors(case))] == [True] * 8 + [False]
    check("mixed_precision", "builtin", case)


#: Words of a finding's message or cause that the failing run has.
SAID = {
    "F26": "differs from one process",
    "F30": "as if masters were not refreshed after the weights were loaded",
}


@pytest.mark.parametrize("mutant", SAID)
def test_a_planted_fault_is_found(mutant: str) -> None:
    done = verify(f"builtin+{mutant}", subjects=["mixed_precision"], examples=200, seed=1, save=None)
    (row,) = done.rows
    assert row.result == "fault", f"{mutant} was not found in {row.examples} examples"
    shrunk = [failure.reproducer.case for failure in row.failures]
    assert any(case.mesh.size <= 2 and len(case.parameters) <= 2 for case in shrunk), shrunk
    found = [finding for failure in row.failures for finding in failure.verdict.findings]
    assert any(SAID[mutant] in f"{finding.message} {finding.cause} {finding.details}" for finding in found), found


def test_copies_of_a_tied_parameter_keep_the_same_bits() -> None:
    """On one stage the copy lies beside another parameter, on the next it is alone: with three data-parallel ranks the
    order in which a buffer's parts are added shows."""
    rounds = Recipe("normal")
    case = MixedPrecisionCase(
        Mesh.of(pp=2, dp=3),
        (MixedParameter(3, tied=True), MixedParameter(4)),
        recipes=MixedPrecisionRecipes(rounds, rounds),
    )
    with Bench("builtin") as bench:
        verdict = bench.once(property_of("mixed_precision"), case).verdict
    assert verdict.holds, verdict.findings
