"""Loss scalers and clipping as the harness judges them: what is right holds, and each fault is told as what it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import Clipper, LossScaler
from harness.bench import Bench
from harness.properties import property_of
from harness.properties.clip_suspects import suspects
from reference.clip import ClipCase, ClipParameter, ClipRecipes, tensors
from reference.clip_expected import expected
from reference.loss_scale import Event, LossScaleCase, Scaling
from reference.mesh import Mesh
from reference.recipe import Recipe

HERE = Path(__file__).parent / "candidates_for_tests" / "scaling.py"
DP = Mesh.of(dp=2)
STEPS = LossScaleCase(DP, (Event(), Event("save"), Event("overflow"), Event("fresh"), Event()))
ALONE = LossScaleCase(DP, (Event(), Event("overflow", "nan", ("dp",), 1)), Scaling(hysteresis=2), agree=True)
SHARDED = ClipCase(DP, (ClipParameter(4, sharded=True),), recipes=ClipRecipes(Recipe("normal")))
THREE = ClipCase(
    Mesh.of(tp=2, dp=2, pp=2),
    (ClipParameter(4, split=True, tied=True), ClipParameter(3, sharded=True, stage=1), ClipParameter(2)),
)
ROUNDS = replace(THREE, recipes=ClipRecipes(Recipe("normal")))
BAD = replace(SHARDED, nonfinite="nan", norm_type="inf")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """One bench a candidate, kept: its ranks are asked again."""
    made: dict[str, Bench] = {}

    def of(candidate: str) -> Bench:
        name = candidate if candidate == "builtin" else f"{HERE}:{candidate}"
        if name not in made:
            made[name] = Bench(name).__enter__()
        return made[name]

    yield of
    for one in made.values():
        one.__exit__(None, None, None)


def said(bench: Any, candidate: str, case: LossScaleCase | ClipCase) -> str:
    subject = property_of("loss_scale" if isinstance(case, LossScaleCase) else "clip")
    verdict = bench(candidate).once(subject, case).verdict
    assert verdict.rejected is None, verdict.rejected
    return "\n".join(f"{one.kind}: {one.message}; {one.cause}; {one.details}" for one in verdict.findings)


@pytest.mark.parametrize(
    ("candidate", "case"),
    [
        ("Simple", STEPS),
        ("Simple", SHARDED),
        ("Aliasing", replace(STEPS, events=(Event(), *(Event("fresh"),) * 2, Event(), Event("fresh")))),
        ("builtin", STEPS),
        ("builtin", ALONE),
        *(
            ("builtin", replace(ALONE, invalid=what))
            for what in ("state_hysteresis", "state_minimum", "state_replenish", "state_truncated", "minimum_negative")
        ),
        ("builtin", SHARDED),
        ("builtin", THREE),
        *(("builtin", replace(BAD, policy=policy)) for policy in ("propagate", "skip", "raise")),
        ("builtin", replace(SHARDED, invalid="limit_zero")),
    ],
)
def test_what_is_right_holds(bench: Any, candidate: str, case: Any) -> None:
    assert said(bench, candidate, case) == ""


@pytest.mark.parametrize(
    ("candidate", "case", "words"),
    [
        (
            "HalfLoaded",
            replace(STEPS, events=(), invalid="state_hysteresis"),
            "mismatch: a load that was refused changed",
        ),
        (
            "HalfConfigured",
            replace(STEPS, events=(), invalid="state_minimum"),
            "mismatch: a load that was refused changed",
        ),
        (
            "ScaleTaken",
            replace(STEPS, events=(), invalid="state_truncated"),
            "mismatch: a load that was refused changed",
        ),
        ("HysteresisAlone", replace(STEPS, invalid="state_growth_factor"), "with another growth_factor were accepted"),
        ("Zeroing", STEPS, "check of event 0 changed the gradients; expected it to look at them alone"),
        ("Summing", STEPS, "the check of the rank's own gradients is True on every rank after event 0"),
        ("Fp32Alone", replace(STEPS, gradients="bf16"), "the check of the rank's own gradients is False"),
        ("CountsText", STEPS, "counters()['good'] returned 'one'; expected a number"),
        ("CountsHalves", STEPS, "counters()['good'] returned 0.5; expected a whole number"),
        ("ScaleTooLarge", STEPS, "expected a number, or a tensor of one element"),
        ("EvilState", STEPS, "in reading the state that it saved on every rank: RuntimeError: no"),
        (
            "OneRankSkips",
            ALONE,
            "disagree: the decision to skip the step is False on rank 0 (dp=0) after event 1 (nan at 1 along dp)",
        ),
        (
            "AcceptsAll",
            replace(ALONE, invalid="growth_interval_zero"),
            "mismatch: scalers with growth_interval=0 were accepted",
        ),
        ("AcceptsAll", ALONE, "disagree: the decision to skip the step is"),
        ("AcceptsAll", replace(SHARDED, invalid="norm_type_zero"), "mismatch: norms of type 0.0 were accepted"),
        ("AcceptsAll", replace(BAD, policy="raise"), "mismatch: gradients with nan were accepted"),
        ("ReturnsNothing", ALONE, "update returned None; expected whether the step is skipped, a bool"),
        ("ReturnsNothing", SHARDED, "clip_gradients returned None; expected Clipper(clip)"),
        (
            "ChangesBeforeItRaises",
            replace(BAD, policy="raise"),
            "a call that raised has changed the gradient of parameter0",
        ),
        ("SkipsAlone", replace(BAD, policy="skip"), "disagree: rank 1 (dp=1) does not skip the step"),
        ("SkipsAlone", SHARDED, "disagree: rank 0 (dp=0) skips the step"),
        ("OtherBits", SHARDED, "disagree: norm"),
    ],
)
def test_each_fault_is_told(bench: Any, candidate: str, case: Any, words: str) -> None:
    found = said(bench, candidate, case)
    assert words in found, found


@pytest.mark.parametrize("norm_type", ["2", "inf"])
@pytest.mark.parametrize(
    ("candidate", "axes"),
    [
        ("NotOverTp", "tp"),
        ("NotOverDp", "dp"),
        ("NotOverPp", "pp"),
        ("OverTp", "dp and pp"),
        ("OverNothing", "tp and dp and pp: each rank counts its own part alone"),
    ],
)
def test_axes_over_which_a_norm_is_not_reduced_are_named(bench: Any, candidate: str, axes: str, norm_type: Any) -> None:
    found = said(bench, candidate, replace(ROUNDS, norm_type=norm_type))
    assert f"is as if it were not reduced over {axes}" in found, found


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_gradients_that_are_scaled_up_to_the_limit_are_named(eps: float) -> None:
    with Bench("builtin+F37b") as bench:
        verdict = bench.once(property_of("clip"), replace(ROUNDS, ratio=4.0, eps=eps)).verdict
    assert any("is as if gradients within the limit were scaled up to it" in str(one.cause) for one in verdict.findings)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"LossScaler\(\.\.\., scale=8\.0\): expected a function"):
        LossScaler(8.0, lambda found: found)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Clipper\(\.\.\., skips=False\): expected a function"):
        Clipper(lambda: 1.0, skips=False)  # type: ignore[arg-type]


def test_no_suspect_is_what_is_right() -> None:
    """And there is one for each known mistake."""
    for case in (THREE, replace(THREE, scale=3), replace(THREE, ratio=2.0, norm_type="1")):
        given = tensors(case)
        right = {name: x for name, x in expected(case, given).items() if x is not None}
        for name in right:
            for one in suspects(case, given, name):
                values = one.values if isinstance(one.values, tuple) else (one.values,)
                assert {value.shape for value in values} == {right[name].shape}
                assert any((value != right[name].numpy()).any() for value in values), (name, one.cause)
        assert len(suspects(case, given, "norm")) >= 4
    assert suspects(BAD, tensors(BAD), "norm") == []
