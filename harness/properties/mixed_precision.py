"""A mixed-precision optimizer: every rank decides as one process does, nothing moves in a step that is skipped, and
else model, masters and state are those of one process, the model the rounded masters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import strategies.mixed_precision
import strategies.mixed_precision_simpler
from harness.candidate import NotOffered
from harness.find import Spec
from harness.mixed_precision_steps import attempt, run
from harness.observation import Observation
from harness.properties.base import Description, Property, World
from harness.properties.mixed_precision_decisions import judge_decisions, stuck
from harness.properties.mixed_precision_masters import joined, judge_copies, judge_masters
from harness.properties.mixed_precision_suspects import suspects
from harness.properties.modules import explanation, wanted
from harness.properties.refusal import half_loaded, judge_refusal
from harness.properties.resumed import judge_resumed
from harness.properties.tensors import Form, Want, judge_tensors
from harness.session import Session
from harness.verdict import Verdict
from harness.world import RankContext
from reference.layout import Whole
from reference.mixed_precision import AXES, MixedPrecisionCase
from reference.mixed_precision_steps import expected, names, plan, tensors


def on_rank(context: RankContext, spec: Spec, case: MixedPrecisionCase, before: World | None = None) -> Observation:
    """Makes the steps on this rank, or sees whether what is wrong is refused. before: what the processes saw that it
    takes over from."""
    candidate = Session.of(context, spec).on(case.mesh)
    if not candidate.offers("mixed_precision"):
        raise NotOffered(f"{spec.text} has no mixed_precision")
    given = tensors(case)
    if case.invalid:
        return attempt(case, given, context.rank, candidate.mixed_precision)
    own = None if before is None else before[context.rank]
    return run(case, given, context.rank, candidate.mixed_precision, context.tell, own)


def runs(case: MixedPrecisionCase, description: Description) -> Sequence[MixedPrecisionCase]:
    """Where the state is loaded, also without an interruption."""
    return (case, replace(case, load=0, relaunch=False)) if case.load and not case.invalid else (case,)


_WRONG = {
    "dtype": "parameters in fp64",
    "lr_negative": "negative learning rates",
    "state_optimizer": "states of another optimizer",
    "state_shape": "states of a parameter of another size",
    "state_scaler": "states with a loss scaler of another configuration",
    "state_truncated": "states that are cut short",
}


def judge(
    case: MixedPrecisionCase, description: Description, want: dict[str, Want], worlds: Sequence[World]
) -> Verdict:
    """Decisions and what moved; then ownership, values, model against masters, copies, and the run without an
    interruption."""
    if case.invalid:
        refusal = judge_refusal(case.mesh, worlds[0], _WRONG[case.invalid])
        return replace(refusal, findings=(*refusal.findings, *half_loaded(case.mesh, worlds[0])))
    given = tensors(case)
    plans = plan(case, given)
    decided = list(judge_decisions(case, plans, worlds[0]))
    if decided:
        return Verdict(tuple(decided))  # values follow from decisions
    seen, ownership = joined(case, worlds[0])
    if ownership is not None:
        return Verdict((ownership,))
    offered = {name for one in seen for name in one.tensors}
    shown = [name for name in want if name in offered or name.startswith("parameter")]
    want = {name: want[name] for name in sorted(shown, key=_telling)}
    forms = forms_of(case)
    why = explanation(forms, case.mesh, seen, {}, 1, lambda name: suspects(case, given, plans, name))
    verdict = judge_tensors(want, forms, case.mesh, seen, why)
    # What saving and loading did explains the rest.
    findings = (
        *judge_resumed(case.mesh, case.load, worlds, verdict.findings, case.relaunch),
        *verdict.findings,
        *judge_masters(case, seen),
        *judge_copies(case, seen),
    )
    return replace(verdict, findings=findings)


def _telling(name: str) -> tuple[int, int]:
    """The first that is wrong is explained: in the first step in which something is, what is kept in fp32, which tells
    mistakes apart that a rounded model does not; then norms, which more mistakes have in common."""
    step = int(name.partition("[")[2].removesuffix("]"))
    kind = 1 if name.startswith(("norm", "coefficient")) else 2 if name.startswith("parameter") else 0
    return step, kind


def forms_of(case: MixedPrecisionCase) -> dict[str, Form]:
    """Numbers are on all ranks; parameters and what is kept for them on those of a stage, cut."""
    forms: dict[str, Form] = {}
    for step in range(case.steps):
        forms |= {f"{what}[{step}]": Form(Whole(), "float64") for what in ("norm", "coefficient")}
        for i in range(len(case.parameters)):
            for kind in ("parameter", "master", *case.states):
                fmt = str(case.format_of(i).torch_dtype).removeprefix("torch.") if kind == "parameter" else "float32"
                for name, stage in zip(names(case, kind, i, step), case.stages(i), strict=True):
                    forms[name] = Form(case.layout(i, stage), fmt)
    return forms


def _expected(case: MixedPrecisionCase, careful: bool = False) -> dict[str, Want]:
    given = tensors(case)
    plans = plan(case, given)
    # Gradients of skipped steps reach nothing, nor do those with a learning rate of 0 or of parameters elsewhere.
    idle = [name for name in given if name.startswith("gradient")]
    return wanted(case.exact, case.format, lambda: expected(case, given, plans), given, idle, careful)


MIXED_PRECISION = Property(
    subject="mixed_precision",
    case_type=MixedPrecisionCase,
    methods=("mixed_precision",),
    features=strategies.mixed_precision.FEATURES,
    cases=strategies.mixed_precision.cases,
    simpler=strategies.mixed_precision_simpler.simpler,
    world=lambda case: case.mesh.size,
    axes=AXES,
    on_rank="harness.properties.mixed_precision:on_rank",
    expected=lambda case: {} if case.invalid else _expected(case),
    careful=lambda case: None if case.invalid or case.exact else _expected(case, careful=True),
    judge=judge,
    runs=runs,
    carried_on=lambda case, world: world if case.relaunch and not case.invalid else None,
    stuck=lambda case, told: None if case.invalid else stuck(case, plan(case, tensors(case)), told),
)
