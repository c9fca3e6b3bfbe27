"""Clipping: the norm, the coefficient and every clipped gradient are those of one process, and the norm has the same
bits on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import strategies.clip
from harness.candidate import NotOffered
from harness.clipping import SKIPS, attempt, run
from harness.find import Spec
from harness.observation import CHANGED, Observation
from harness.properties.base import Description, Property, World
from harness.properties.clip_suspects import suspects
from harness.properties.modules import explanation, wanted
from harness.properties.refusal import judge_refusal
from harness.properties.tensors import Form, Want, judge_tensors
from harness.session import Session
from harness.verdict import Finding, Verdict
from harness.world import RankContext
from reference.clip import AXES, ClipCase, measured, names, tensors
from reference.clip_expected import expected
from reference.layout import Whole


def on_rank(context: RankContext, spec: Spec, case: ClipCase) -> Observation:
    """Clips the gradients of this rank, or sees whether what is wrong is refused."""
    candidate = Session.of(context, spec).on(case.mesh)
    if not candidate.offers("clip_gradients"):
        raise NotOffered(f"{spec.text} has no clip_gradients")
    given = tensors(case)
    if _is_refused(case):
        return attempt(case, given, context.rank, candidate.clip_gradients)
    return run(case, given, context.rank, candidate.clip_gradients)


def _is_refused(case: ClipCase) -> bool:
    return case.invalid is not None or (case.policy == "raise" and not math.isfinite(measured(case)[0]))


def _wrong(case: ClipCase) -> str:
    if case.invalid is None:
        return f"gradients with {case.nonfinite}"
    if case.invalid.startswith("limit"):
        return f"limits of {case.asked_limit}"
    if case.invalid.startswith("norm"):
        return f"norms of type {case.asked_norm_type}"
    return f"policies named {case.asked_policy!r}"


def judge(case: ClipCase, description: Description, want: dict[str, Want], worlds: Sequence[World]) -> Verdict:
    """Norm, coefficient and gradients, then the decision to skip."""
    seen = worlds[0]
    if _is_refused(case):
        refusal = judge_refusal(case.mesh, seen, _wrong(case))
        return replace(refusal, findings=(*refusal.findings, *_changed(case, seen)))
    given = tensors(case)
    if not any("coefficient" in one.tensors for one in seen):
        want = {name: one for name, one in want.items() if name != "coefficient"}
    forms = forms_of(case, want)
    why = explanation(forms, case.mesh, seen, {}, 1, lambda name: suspects(case, given, name))
    verdict = judge_tensors(want, forms, case.mesh, seen, why)
    return replace(verdict, findings=(*verdict.findings, *_skips(case, seen)))


def forms_of(case: ClipCase, wanted: dict[str, Want]) -> dict[str, Form]:
    """Numbers are on all ranks; gradients on those of a stage, cut."""
    forms: dict[str, Form] = {name: Form(Whole(), "float64") for name in ("norm", "coefficient") if name in wanted}
    dtype = str(case.format.torch_dtype).removeprefix("torch.")
    for i in range(len(case.parameters)):
        for name, stage in zip(names(case, i), case.stages(i), strict=True):
            forms[name] = Form(case.layout(i, stage), dtype)
    return forms


def _changed(case: ClipCase, seen: World) -> Iterator[Finding]:
    for rank, one in enumerate(seen):
        changed = one.facts.get(CHANGED)
        if changed:
            place = case.mesh.describe(rank)
            message = f"a call that raised has changed the gradient of {', '.join(changed)} on {place}"
            yield Finding("mismatch", message, rank, place)
            return


def _skips(case: ClipCase, seen: World) -> Iterator[Finding]:
    """Where the policy is to skip, all ranks skip where the norm is not finite, and none does else."""
    due = case.policy == "skip" and not math.isfinite(measured(case)[0])
    said = [one.facts.get(SKIPS) for one in seen]
    wrong = [rank for rank, skips in enumerate(said) if skips is not None and skips != due]
    if wrong:
        rank, place = wrong[0], case.mesh.describe(wrong[0])
        kind = "disagree" if len(wrong) < len(seen) else "mismatch"
        what = ("skips", "does not skip")[due]
        yield Finding(kind, f"{place} {what} the step; expected the other", rank, place)  # type: ignore[arg-type]


def _expected(case: ClipCase, careful: bool = False) -> dict[str, Want]:
    given = tensors(case)
    norm, _ = measured(case)
    if not math.isfinite(norm):  # nothing of it is a number that rounds
        return {**expected(case, given)}
    return wanted(case.exact, case.format, lambda: expected(case, given), given, (), careful)


def _careful(case: ClipCase) -> dict[str, Want] | None:
    estimated = not _is_refused(case) and not case.exact and math.isfinite(measured(case)[0])
    return _expected(case, careful=True) if estimated else None


CLIP = Property(
    subject="clip",
    case_type=ClipCase,
    methods=("clip_gradients",),
    features=strategies.clip.FEATURES,
    cases=strategies.clip.cases,
    simpler=strategies.clip.simpler,
    world=lambda case: case.mesh.size,
    axes=AXES,
    on_rank="harness.properties.clip:on_rank",
    expected=lambda case: {} if _is_refused(case) else _expected(case),
    careful=_careful,
    judge=judge,
)
