"""Suspects, stale values, shards that are alike, and lower precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
from test_patterns_evidence import EXACT_AND_NOT, TP2, TP4, TP_DP, Planted, spoiled

from harness.oracle.patterns.alike import alike_along_an_axis
from harness.oracle.patterns.evidence import Evidence, Suspect
from harness.oracle.patterns.formats import format_named, rounded
from harness.oracle.patterns.low_precision import low_precision, rounding
from harness.oracle.patterns.stale import another_tensor, zeros
from harness.oracle.patterns.suspected import possible, suspected
from reference.layout import Each, Split, Whole
from reference.mesh import Mesh


@EXACT_AND_NOT
def test_the_suspect_that_fits_is_named(exact: bool) -> None:
    planted = Planted((4, 6), Split(-1, "tp"), TP2, exact)
    parts = planted.fresh((2, 4, 6))
    planted.got = [planted.parts(parts[rank])[rank] for rank in range(2)]
    suspects = [
        Suspect("is right", planted.want),
        Suspect("is something else", planted.fresh((4, 6))),
        Suspect("equals the rank's own part", tuple(parts)),
        Suspect("has another shape", np.zeros((3, 3))),
    ]
    assert suspected(planted.evidence(suspects=lambda: suspects)) == "every rank's x equals the rank's own part"
    assert spoiled(planted, suspected, suspects=lambda: suspects) is None
    assert suspected(planted.evidence(suspects=lambda: suspects[:2])) is None
    assert suspected(planted.evidence()) is None
    planted.got[0] = planted.parts(planted.want)[0]
    assert suspected(planted.evidence(suspects=lambda: suspects)) == "rank 1's x equals the rank's own part"


def test_suspects_that_cannot_be_told_apart() -> None:
    planted = Planted((4, 6), Split(-1, "tp"), TP2)
    wrong = planted.fresh((4, 6))
    planted.got = planted.parts(wrong)
    suspects = [Suspect(f"is {cause}", wrong) for cause in ("this", "that", "a third")]
    assert suspected(planted.evidence(suspects=lambda: suspects[:2])) == "every rank's x either is this, or is that"
    assert suspected(planted.evidence(suspects=lambda: [suspects[0]] * 3)) == "every rank's x is this"
    assert suspected(planted.evidence(suspects=lambda: suspects)) is None
    assert len(possible(planted.evidence(suspects=lambda: suspects))) == 3


def test_what_right_ranks_agree_with_too_wins() -> None:
    planted = Planted((4, 6), Split(-1, "tp"), TP2)
    wrong = planted.fresh((4, 6))
    planted.got[0] = planted.parts(wrong)[0]
    one = Suspect("is wrong on the first rank", (wrong, planted.want))
    both = Suspect("is wrong on both ranks", wrong)
    assert suspected(planted.evidence(suspects=lambda: [both, one])) == "rank 0's x is wrong on the first rank"


def test_one_small_error_makes_no_suspect_sure() -> None:
    want = np.array([[7.0]])
    suspects = [Suspect(f"is off by {k}", want + k) for k in range(1, 5)]
    evidence = Evidence("x", want, Whole(), TP2, (want + 2,) * 2, None, "float32", suspects=lambda: suspects)
    assert suspected(evidence) is None
    assert possible(evidence) == ("every rank's x is off by 2",)


def test_suspects_are_made_once_and_only_when_needed() -> None:
    made = []

    def suspects() -> list[Suspect]:
        made.append(1)
        return []

    evidence = Planted((4,), Whole(), TP2).evidence(suspects=suspects)
    assert not made
    assert [suspected(evidence), possible(evidence)] == [None, ()]
    assert len(made) == 1


@EXACT_AND_NOT
def test_zeros(exact: bool) -> None:
    planted = Planted((4, 6), Split(-1, "tp"), TP2, exact)
    planted.got[1] = np.zeros((4, 3))
    said = "rank 1's x is zero everywhere: never written, or overwritten"
    assert zeros(planted.evidence()) == said
    half = planted.want.copy()
    half[:, 3:] = 0
    suspects = [Suspect("equals the rank's own part", half), Suspect("is double", 2 * planted.want)]
    assert zeros(planted.evidence(suspects=lambda: suspects)) == f"{said}, or it equals the rank's own part"
    assert spoiled(planted, zeros) is None
    planted.got[0] = np.zeros((4, 3))
    assert zeros(planted.evidence()) == "every rank's x is zero everywhere: never written, or overwritten"
    planted.got[0][0, 0] = math.nan
    assert zeros(planted.evidence()) is None


def test_one_small_zero_is_no_pattern() -> None:
    want = np.array([[3.0]])
    assert zeros(Evidence("x", want, Whole(), TP2, (want * 0,) * 2, None, "float32")) is None


@EXACT_AND_NOT
def test_the_values_of_another_tensor(exact: bool) -> None:
    planted = Planted((3, 4, 6), (Each("dp"), Split(-1, "tp")), TP_DP, exact)
    others = {name: planted.fresh((3, 4, 6)) for name in ("x[0].grad", "x[1].grad", "x[2].grad", "y", "x.initial")}
    others["bias"] = planted.fresh((6,))

    def said(of: str, name: str) -> str | None:
        planted.got[3] = planted.parts(others[of])[3]
        evidence = Evidence(
            name, planted.want, planted.layout, planted.mesh, tuple(planted.got), planted.tolerance, "float32", others
        )
        return another_tensor(evidence)

    assert said("x[1].grad", "x[2].grad") == (
        "rank 3's x[2].grad equals x[1].grad: stale or overwritten, the values of another micro-batch"
    )
    assert said("x[1].grad", "z[2].grad") == "rank 3's z[2].grad equals x[1].grad: another tensor's values"
    assert said("x.initial", "x") == "rank 3's x holds its initial values: it was never updated"
    assert spoiled(planted, another_tensor, others=others) is None
    others["y"] = planted.want.copy()
    assert said("y", "x") is None, "another name of what is right"


def test_two_other_tensors_with_these_values() -> None:
    planted = Planted((4, 6), Whole(), TP2)
    others = {"y": planted.fresh((4, 6)), "z": planted.fresh((4, 6))}
    planted.got = [others["y"], others["y"]]
    assert another_tensor(planted.evidence(others={**others, "same": others["y"]})) == (
        "every rank's x equals y: another tensor's values"
    )
    planted.got = [others["y"], others["z"]]
    assert another_tensor(planted.evidence(others=others)) is None, "one of each"


@pytest.mark.parametrize("name", ["weight.initial", "weight.grad"])
def test_every_shard_from_the_same_seed(name: str) -> None:
    def said(parts: list[np.ndarray], want: np.ndarray, dim: int, mesh: Mesh = TP2) -> str | None:
        return alike_along_an_axis(Evidence(name, want, Split(dim, "tp"), mesh, tuple(parts), None, "float32"))

    stream = np.random.default_rng(1).standard_normal(100)
    want = np.random.default_rng(0).standard_normal((7, 4))
    # Uneven shards: the same stream, as far as each of them goes.
    found = said([stream[:16].reshape(4, 4), stream[:12].reshape(3, 4)], want, 0)
    assert found is not None
    assert "is the same on all ranks of tp" in found
    assert ("initialised from the same seed" in found) is (name == "weight.initial")
    assert said([want[:4], want[:3]], want, 0) is not None, "the first shard is right"
    assert said([stream[:16].reshape(4, 4), stream[1:13].reshape(3, 4)], want, 0) is None
    assert said([np.ones((4, 4)), np.ones((3, 4))], want, 0) is None, "constants are alike whatever the seed"
    want[:, 2:] = want[:, :2]
    assert said([stream[:14].reshape(7, 2)] * 2, want, 1) is None, "they are to be alike"


def test_alike_along_one_axis_of_two() -> None:
    planted = Planted((3, 8, 5), (Each("dp"), Split(0, "tp")), TP_DP)
    for dp in range(3):
        planted.got[2 * dp + 1] = planted.got[2 * dp]
    assert "x is the same on all ranks of tp, where each has a part of its own" in (
        alike_along_an_axis(planted.evidence()) or ""
    )
    assert spoiled(planted, alike_along_an_axis) is None
    planted.got = [planted.got[0]] * 6
    assert "is the same on all ranks of tp and dp" in (alike_along_an_axis(planted.evidence()) or "")
    planted = Planted((8, 5), Split(0, "tp"), TP_DP)
    planted.got = planted.parts(planted.fresh((8, 5)))
    assert alike_along_an_axis(planted.evidence()) is None, "replicas are to be alike"


@pytest.mark.parametrize(("lower", "said"), [("bfloat16", "bfloat16"), ("float16", "float16")])
@EXACT_AND_NOT
def test_a_lower_precision(exact: bool, lower: str, said: str) -> None:
    planted = Planted((6, 5), Split(0, "tp"), TP2, exact)
    planted.want = planted.want * (100 if exact else 1) + 1
    planted.got = [rounded(part, format_named(lower)) for part in planted.parts(planted.want)]
    found = low_precision(planted.evidence())
    assert found is not None
    assert found.endswith(f"{said}: kept in a lower precision than float32") or f"of {said}, off by" in found
    assert spoiled(planted, low_precision) is None
    assert low_precision(planted.evidence(dtype=lower)) is None, "that is its own precision"


def test_a_total_that_is_kept_in_a_lower_precision() -> None:
    bf16 = format_named("bfloat16")
    planted = Planted((6, 5), Whole(), Mesh())
    terms = [256 * planted.want, planted.fresh((6, 5)), planted.fresh((6, 5))]
    planted.want = sum(terms)
    total = np.zeros((6, 5))
    for term in terms:
        total = rounded(total + rounded(term, bf16), bf16)
    planted.got = [total]
    assert "x holds only values of bfloat16, off by its rounding" in (
        low_precision(planted.evidence(micro_batches=3)) or ""
    )
    # Where totals cancel, what was lost is large beside what is left: the largest values say how large.
    back = -terms[0]
    back[:, 0] = 0
    planted.want, total = sum(terms) + back, rounded(total + back, bf16)
    planted.got = [total]
    assert low_precision(planted.evidence(micro_batches=4)) is not None
    assert low_precision(planted.evidence(micro_batches=1)) is None, "nothing was added up"
    planted.got = [planted.want + 5000]
    assert low_precision(planted.evidence(micro_batches=3)) is None


def test_small_whole_numbers_are_in_every_format() -> None:
    planted = Planted((6, 5), Whole(), TP2)
    planted.want = np.round(planted.want / 10)
    planted.got = [planted.want + 1, planted.want + 1]
    assert low_precision(planted.evidence()) is None


def test_something_rounded_on_the_way() -> None:
    planted = Planted((6, 5), Whole(), TP2)
    planted.want = np.round(planted.want / 6)
    planted.want[2, 1] = 50.0
    planted.got = planted.parts(planted.want)
    for part in planted.got:
        part[2, 1] += 0.25
    said = "every rank's x is off by a unit in the last place of bfloat16: something is rounded on the way that one"
    assert said in (rounding(planted.evidence(dtype="bfloat16")) or "")
    assert rounding(planted.evidence(dtype="float32")) is None, "many of its units"
    assert spoiled(planted, rounding, dtype="bfloat16") is None
    planted.got[0][0, 0] = math.nan
    assert rounding(planted.evidence(dtype="bfloat16")) is None
    planted.got = [part + 1 for part in planted.parts(planted.want)]
    assert rounding(planted.evidence(dtype="bfloat16")) is None, "a whole number off may be a term too much"


def test_rounding_of_few_values_is_far_finer_than_they_are() -> None:
    want = np.array([[-96.0], [4.0], [64.0]])
    off = np.array([[2.0**-46], [0.0], [0.0]])
    assert "a unit in the last place of float64" in (
        rounding(Evidence("x", want, Whole(), TP2, (want - off, want), None, "float64")) or ""
    )
    bf16 = Evidence("x", want, Whole(), TP2, (want - 0.5, want), None, "bfloat16")
    assert rounding(bf16) is None, "4 is their grid by chance"


def test_low_precision_has_three_values_at_least() -> None:
    mesh, bf16 = TP4, format_named("bfloat16")
    want = np.array([257.0, 259.0])
    evidence = Evidence("x", want, Whole(), mesh, (rounded(want, bf16),) * 4, None, "float32")
    assert low_precision(evidence) is None
