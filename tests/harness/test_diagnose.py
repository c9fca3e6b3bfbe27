"""The diagnosis as a whole: the most specific pattern speaks, nothing breaks it, and it does not guess."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from drawing import Cut, cuts
from hypothesis import given
from hypothesis import strategies as st
from test_patterns_evidence import TP2, TP4, Planted

from harness.observation import LocalTensor, Observation
from harness.oracle.diagnose import diagnose, evidence_of
from harness.oracle.patterns import FACTS, PATTERNS
from harness.oracle.patterns.evidence import Evidence, Suspect
from reference.layout import Partial, Split, Whole, window
from reference.mesh import Mesh


def pattern_of(planted: Planted, **more: Any) -> str | None:
    found = diagnose(planted.evidence(**more))
    assert found is not None
    return found.pattern


def test_what_is_right_has_no_diagnosis() -> None:
    for exact in (True, False):
        assert diagnose(Planted((8, 4), Split(0, "tp"), TP4, exact).evidence()) is None


def test_a_cause_that_the_subject_knows_goes_before_a_bare_factor() -> None:
    planted = Planted((8, 4), Split(0, "tp"), TP4)
    planted.got = [4 * part for part in planted.got]
    assert pattern_of(planted) == "named_factor"
    suspects = [Suspect("is reduced again", 4 * planted.want)]
    found = diagnose(planted.evidence(suspects=lambda: suspects))
    assert found is not None
    assert (found.pattern, found.sentence) == ("suspected", "every rank's x is reduced again")


def test_shards_that_are_alike_go_before_moved_ones_and_moved_ones_before_reordered_slices() -> None:
    planted = Planted((8, 4), Split(0, "tp"), TP2)
    first, second = planted.got
    planted.got = [first, first.copy()]
    assert pattern_of(planted) == "alike_along_an_axis"
    planted.got = [second, first]
    assert pattern_of(planted) == "moved_shards"
    planted.got = planted.parts(planted.want[[0, 1, 2, 7, 4, 5, 6, 3]])
    assert pattern_of(planted) == "reordered_slices"


def test_a_cause_goes_before_the_place() -> None:
    planted = Planted((8, 4), Split(0, "tp"), TP2)
    planted.got[1] = 2 * planted.got[1]
    assert pattern_of(planted) == "named_factor"
    planted.got[1] = planted.fresh((4, 4))
    assert pattern_of(planted) in ("past_an_index", "only_some_ranks")
    planted.got[0] = planted.fresh((4, 4))
    found = diagnose(planted.evidence())
    assert found is not None
    assert (found.sentence, found.pattern) == (None, None)
    assert found.damage.wrong > 20


def test_what_is_possible_is_said_where_nothing_is_sure() -> None:
    want = np.array([[7.0]])
    suspects = [Suspect("has the bias twice", want + 2), Suspect("is zero", want * 0)]
    evidence = Evidence("x", want, Whole(), TP2, (want + 2,) * 2, None, "float32", suspects=lambda: suspects)
    found = diagnose(evidence)
    assert found is not None
    assert (found.sentence, found.possible) == (None, ("every rank's x has the bias twice",))
    assert found.lines() == [
        "possible, but too few values to be sure: every rank's x has the bias twice",
        "wrong: 2 of 2 elements (100%); all of every rank",
        "worst: [0, 0] (local [0, 0]) on rank 0 (tp=0): got 9.0, want 7.0, off by 2",
    ]
    named = diagnose(Evidence("x", want * 5, Whole(), TP2, (want * 10,) * 2, None, "float32"))
    assert named is not None
    assert named.possible == (
        "every element of x is 2 times too large: the size of tp, as when summed where one copy is due",
    )
    many = [Suspect(f"is {i}", want + 2) for i in range(4)]
    found = diagnose(Evidence("x", want, Whole(), TP2, (want + 2,) * 2, None, "float32", suspects=lambda: many))
    assert found is not None
    assert found.possible == ()


def test_a_sure_diagnosis_leads_the_lines() -> None:
    planted = Planted((8, 4), Split(0, "tp"), TP4)
    planted.got = [-part for part in planted.got]
    found = diagnose(planted.evidence())
    assert found is not None
    assert found.lines()[0] == "diagnosis: every element of x has the wrong sign"


def observed(*values: np.ndarray, dtype: str = "float32") -> list[Observation]:
    return [Observation({"x": LocalTensor(v, dtype)}) for v in values]


def test_evidence_of_observations() -> None:
    want = np.arange(8.0).reshape(2, 4)
    halves = [want[:, :2], want[:, 2:]]
    found = evidence_of("x", observed(*halves), Split(1, "tp"), TP2, want, None, "float32", micro_batches=3)
    assert found is not None
    assert (found.wrong_ranks, found.micro_batches) == ((), 3)
    summed = evidence_of("x", observed(want - 1, want + 1), Partial("tp"), TP2, want, None, "float32")
    assert summed is not None
    assert np.array_equal(summed.got[0], 2 * want)


@pytest.mark.parametrize(
    "ranks",
    [
        [Observation(), Observation()],
        observed(np.zeros((2, 4)), np.zeros((4, 2))),
        observed(np.zeros((2, 4)), np.zeros((2, 4)), dtype="float64"),
        [*observed(np.zeros((2, 4))), Observation({"x": LocalTensor(None, "float32", problem="is an int")})],
    ],
)
def test_no_evidence_where_there_are_no_numbers_to_compare(ranks: list[Observation]) -> None:
    assert evidence_of("x", ranks, Whole(), TP2, np.zeros((2, 4)), None, "float32") is None
    assert evidence_of("x", ranks, Whole(), TP2, None, None, "float32") is None


@given(cuts(partial=True), st.data())
def test_nothing_that_ranks_hold_breaks_it(cut: Cut, data: st.DataObject) -> None:
    """Values of any kind, tolerances of any kind, tensors of any shape, also empty ones."""
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    special = np.array([0.0, -0.0, 1.0, -3.0, math.nan, math.inf, -math.inf, 1e308, 5e-324, 0.1])
    scale = data.draw(st.sampled_from([1.0, 1e306, 1e-310]))
    with np.errstate(over="ignore"):
        want = cut.values * scale if data.draw(st.booleans()) else rng.choice(special, size=cut.values.shape)
    got = [window(want.shape, cut.layout, cut.mesh, rank).take(want).copy() for rank in range(cut.mesh.size)]
    for rank in range(cut.mesh.size):
        if data.draw(st.booleans()):
            got[rank] = np.where(rng.random(got[rank].shape) < 0.5, got[rank], rng.choice(special, got[rank].shape))
    none = np.zeros(want.shape)
    tolerance = data.draw(
        st.sampled_from([None, none, np.full(want.shape, 0.1), rng.choice(np.abs(special), size=want.shape)])
    )
    dtype = data.draw(st.sampled_from(["float32", "float64", "bfloat16", "float16", "float8_e5m2"]))
    with np.errstate(all="ignore"):
        suspects = [Suspect("is double", 2 * want), Suspect("is nothing", none), Suspect("is odd", np.zeros(5))]
    others = {"x": want, "y": want[..., :1] if want.ndim else want, "z[0]": none}
    evidence = Evidence(
        "x", want, cut.layout, cut.mesh, tuple(got), tolerance, dtype, others, 2, suspects=lambda: suspects
    )
    found = diagnose(evidence)
    assert found is None or found.lines()
    assert (found is not None) >= bool(evidence.wrong_ranks)


def test_random_errors_have_no_cause() -> None:
    """Small tensors of small whole numbers, where many explanations lie near by chance."""
    rng, guessed, told = np.random.default_rng(0), 0, 0
    meshes = [TP2, TP4, Mesh.of(tp=2, dp=2), Mesh.of(tp=3)]
    for seed in range(400):
        mesh = meshes[seed % 4]
        shape = tuple(int(n) for n in rng.integers(1, 5, size=int(rng.integers(1, 4))))
        planted = Planted(shape, Split(0, "tp") if seed % 2 else Whole(), mesh, seed=seed)
        largest = int(rng.choice([2, 10, 1000]))
        planted.want = rng.integers(-largest, largest, size=shape, endpoint=True).astype(np.float64)
        planted.got = planted.parts(planted.want)
        wrong = planted.want + rng.integers(-largest, largest, size=shape, endpoint=True)
        for rank in range(mesh.size) if seed % 3 else [int(rng.integers(mesh.size))]:
            planted.got[rank] = window(shape, planted.layout, mesh, rank).take(wrong).copy()
        bias = rng.integers(-largest, largest, size=shape[-1:], endpoint=True).astype(np.float64)
        suspects = [
            *(Suspect(f"is {k}", planted.want + k * bias) for k in (1, 2, -1)),
            *(Suspect(f"is {k}", k * planted.want) for k in (2, 0.5, 4)),
            *(Suspect(f"is {k}", rng.integers(-largest, largest, size=shape).astype(float)) for k in range(8)),
        ]
        more = {"others": {"bias": bias, "y": rng.permutation(planted.want)}, "suspects": lambda s=suspects: s}
        found = diagnose(planted.evidence(**more))
        told += found is not None
        guessed += found is not None and found.pattern is not None and found.pattern not in FACTS
    assert told > 350
    assert guessed <= told * 0.02, f"{guessed} of {told} random errors were explained"


def test_errors_near_their_tolerance_have_no_cause() -> None:
    rng, guessed = np.random.default_rng(0), 0
    for seed in range(200):
        shape = tuple(int(n) for n in rng.integers(1, 5, size=int(rng.integers(1, 4))))
        planted = Planted(shape, Split(0, "tp") if seed % 2 else Whole(), TP4, exact=False, seed=seed)
        planted.tolerance = 10.0 ** rng.uniform(-4, -0.5) * np.maximum(np.abs(planted.want), 0.3)
        error = planted.tolerance * rng.choice([1.5, 5, 30, 1000]) * rng.standard_normal(shape)
        planted.got = planted.parts(planted.want + error)
        bias = rng.standard_normal(shape[-1:])
        suspects = [
            *(Suspect(f"is {k}", planted.want + k * bias) for k in (1, 2, -1)),
            *(Suspect(f"is {k}", k * planted.want) for k in (2, 0.5, 4)),
            *(Suspect(f"is {k}", rng.standard_normal(shape)) for k in range(8)),
        ]
        more = {"others": {"bias": bias, "y": rng.permutation(planted.want)}, "suspects": lambda s=suspects: s}
        found = diagnose(planted.evidence(**more))
        guessed += found is not None and found.pattern is not None and found.pattern not in FACTS
    assert guessed <= 2


def test_the_names_of_the_patterns() -> None:
    assert set(PATTERNS) > FACTS
