"""Training steps of a GPT over tensor-, pipeline- and data-parallel ranks: losses, norms, decisions, and at the end
weights, masters and moments are those of one process on the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import strategies.train_step
import strategies.train_step_simpler
from harness.find import Spec
from harness.observation import Observation
from harness.properties.base import Description, Property, World
from harness.properties.gpt import copies_differ, loss_cut
from harness.properties.gpt_dropout import judge_with_masks
from harness.properties.mixed_precision_decisions import judge_decisions, stuck
from harness.properties.modules import explanation, wanted
from harness.properties.resumed import judge_resumed
from harness.properties.tensors import Form, Want, judge_tensors
from harness.properties.train_step_kept import joined, judge_masters
from harness.properties.train_step_suspects import suspects
from harness.train_step_run import builder, run
from harness.verdict import Verdict
from harness.world import RankContext
from reference.gpt import MODEL_AXES
from reference.gpt_dropout import Masks
from reference.gpt_parameters import tensors
from reference.layout import Whole
from reference.train_step import TrainStepCase
from reference.train_step_expected import expected, plan


def on_rank(context: RankContext, spec: Spec, case: TrainStepCase, before: World | None = None) -> Observation:
    """Builds this rank's trainer, and has it make the steps. before: what the processes saw that it takes over from."""
    rank = context.rank
    return run(case, rank, builder(context, spec), context.tell, None if before is None else before[rank])


def runs(case: TrainStepCase, description: Description) -> Sequence[TrainStepCase]:
    """Where the same ranks load the state, also without an interruption."""
    return (case, replace(case, load=0, relaunch=False)) if case.load and case.resume == "same" else (case,)


def judge(case: TrainStepCase, description: Description, want: dict[str, Want], worlds: Sequence[World]) -> Verdict:
    """Decisions and what moved; then who keeps what, values, the model against its masters, copies of a tied weight,
    and the run without an interruption."""
    decided = list(judge_decisions(case, plan(case), worlds[0]))
    if decided:
        return Verdict(tuple(decided))  # values follow from decisions
    seen, ownership = joined(case, worlds[0])
    if ownership is not None:
        return Verdict((ownership,))
    forms = forms_of(case, seen[0])
    offered = {name for one in seen for name in one.tensors}
    always = {*seen[0].layouts, *(f"loss[{step}]" for step in range(case.steps))}
    known = (lambda name: suspects(case, tensors(case.model), name)) if not case.model.dropout else lambda name: ()
    why = explanation(forms, case.mesh, seen, {}, case.model.micro_batches, known)

    def against(want: dict[str, Want]) -> Verdict:
        compared = {name: one for name, one in want.items() if name in offered | always}
        return judge_tensors(compared, forms, case.mesh, seen, why)

    if case.model.dropout:
        verdict = judge_with_masks(case.model, seen, lambda kept, careful: against(_wanted(case, kept, careful)))
    else:
        verdict = against(want)
    # What saving and loading did explains the rest.
    findings = (
        *judge_resumed(case.mesh, case.load, worlds, verdict.findings, case.relaunch),
        *verdict.findings,
        *judge_masters(case, seen),
        *(one for kind in ("", *case.kept) for one in copies_differ(case.model, seen, kind and f".{kind}")),
    )
    return replace(verdict, findings=findings)


def forms_of(case: TrainStepCase, seen: Observation) -> dict[str, Form]:
    """The loss is on the ranks of the last stage, other numbers are on all; what is kept lies as the parameters do."""
    forms: dict[str, Form] = {}
    for step in range(case.steps):
        forms[f"loss[{step}]"] = Form(loss_cut(case.model)["loss"], "float32")
        forms |= {f"{what}[{step}]": Form(Whole(), "float64") for what in ("norm", "coefficient")}
    plain = str(case.model.format.torch_dtype).removeprefix("torch.")
    for name, layout in seen.layouts.items():
        forms[name] = Form(layout, plain)
        forms |= {f"{name}.{kind}": Form(layout, "float32") for kind in case.kept}
    return forms


def _expected(case: TrainStepCase, careful: bool = False) -> dict[str, Want]:
    """Nothing where masks are to be seen first."""
    return {} if case.model.dropout else _wanted(case, (), careful)


def _wanted(case: TrainStepCase, kept: Sequence[Masks], careful: bool) -> dict[str, Want]:
    given, plans = tensors(case.model), plan(case)
    compute = lambda: expected(case, given, plans, kept=kept)  # noqa: E731
    return wanted(False, case.model.format, compute, given, careful=careful)


TRAIN_STEP = Property(
    subject="train_step",
    case_type=TrainStepCase,
    methods=("train_step",),
    features=strategies.train_step.FEATURES,
    cases=strategies.train_step.cases,
    simpler=strategies.train_step_simpler.simpler,
    world=lambda case: case.mesh.size,
    axes=MODEL_AXES,
    on_rank="harness.properties.train_step:on_rank",
    expected=_expected,
    careful=lambda case: None if case.model.dropout else _expected(case, careful=True),
    judge=judge,
    runs=runs,
    carried_on=lambda case, world: world if case.relaunch else None,
    stuck=lambda case, told: stuck(case, plan(case), told),
)
