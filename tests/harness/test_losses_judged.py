"""What is said of a loss that is right but for its form, what it accepts, or what it sends."""

from __future__ import annotations

import dataclasses

import pytest
from trials import CANDIDATES

from harness.bench import Bench
from harness.properties import property_of
from harness.verdict import Finding
from reference.cross_entropy import CrossEntropyCase
from reference.mesh import Mesh

CASE = CrossEntropyCase(Mesh.of(tp=2), 4, ((3,),), dtype="bf16", padding=1)
SUBJECT = property_of("cross_entropy")


def findings(candidate: str, case: CrossEntropyCase) -> tuple[Finding, ...]:
    with Bench(f"{CANDIDATES}/losses.py:{candidate}") as bench:
        return bench.check(SUBJECT, case).verdict.findings


def test_the_right_loss_holds() -> None:
    assert findings("Changed", CASE) == ()
    assert findings("Changed", dataclasses.replace(CASE, invalid="past")) == ()


def test_the_loss_of_bf16_logits_is_in_fp32() -> None:
    (finding,) = findings("InTheDtypeOfTheLogits", CASE)
    assert finding.kind == "mismatch"
    assert "loss[0] has dtype torch.bfloat16; expected torch.float32" in finding.message
    assert findings("InTheDtypeOfTheLogits", dataclasses.replace(CASE, dtype="fp32")) == ()


def test_the_loss_has_the_shape_that_was_asked() -> None:
    (finding,) = findings("OneLossForAll", CASE)
    assert "loss[0] has local shape (); expected (3,)" in finding.message


@pytest.mark.parametrize(("invalid", "wrong"), [("past", 4), ("negative", -1)])
def test_a_target_out_of_range_must_be_refused(invalid: str, wrong: int) -> None:
    case = dataclasses.replace(CASE, invalid=invalid)  # type: ignore[arg-type]
    (finding,) = findings("TakesAnyTarget", case)
    assert finding.kind == "mismatch"
    assert f"targets with {wrong}, not in a vocabulary of 4 were accepted: expected an error" in finding.message
    (finding,) = findings("TakesAnyTargetOnRank1", case)
    assert finding.kind == "disagree"
    assert "were accepted on rank 1 (tp=1) and refused on rank 0 (tp=0): in training that is a hang" in finding.message
    assert f"target {wrong} is out of range" in finding.details


def test_one_all_reduce_more_than_needed_is_reported() -> None:
    (finding,) = findings("AgreesOnTheLossOnceMore", CASE)
    assert finding.kind == "traffic"
    assert "more traffic than needed in the forward of micro-batch 0: all_reduce" in finding.message
