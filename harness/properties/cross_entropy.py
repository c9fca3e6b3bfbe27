"""Cross entropy: losses and the logits' gradients equal one process, with three all-reduces; targets out of range are
refused on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import strategies.cross_entropy
from harness.candidate import NotOffered
from harness.drive import attempt, drive
from harness.exercise import Exercise, Given, MicroBatch, Names, Result
from harness.find import Spec
from harness.observation import Observation
from harness.oracle.patterns.evidence import Suspect
from harness.properties.base import Description, Property, World
from harness.properties.cross_entropy_suspects import suspects
from harness.properties.modules import explanation, forms_of, wanted
from harness.properties.refusal import judge_refusal
from harness.properties.tensors import Want, judge_tensors
from harness.properties.traffic import judge_traffic
from harness.session import Session, phase
from harness.verdict import Verdict
from harness.world import RankContext
from reference.cross_entropy import CrossEntropyCase, expected, tensors
from reference.cross_entropy_traffic import needed
from reference.layout import Each, Layout, Rule, Split

_NAMES = Names(parameters=(), inputs=("logits", "targets"), outputs=("loss",))


def layouts(case: CrossEntropyCase, uneven: Rule = "balanced") -> dict[str, Layout]:
    """How each tensor that goes in or comes out is cut, by its base name."""
    each = Each(case.replica_axes)
    return {"logits": (each, Split(-1, case.axis, rule=uneven)), "targets": (each,), "loss": (each,)}


def on_rank(context: RankContext, spec: Spec, case: CrossEntropyCase) -> Observation:
    """Builds the loss and drives it on this rank, or sees whether it refuses."""
    candidate = Session.of(context, spec).on(case.mesh)
    if not candidate.offers("cross_entropy"):
        raise NotOffered(f"{spec.text} has no cross_entropy")
    given, cuts, loss_dtype = tensors(case), layouts(case, candidate.uneven), case.loss_format.torch_dtype
    exercise = Exercise(
        mesh=case.mesh,
        rank=context.rank,
        dtype=case.format.torch_dtype,
        names=_NAMES,
        parameters={},
        micro_batches=[
            MicroBatch(
                {
                    f"logits[{m}]": Given(given[f"logits[{m}]"], cuts["logits"], case.logits_require_grad),
                    f"targets[{m}]": Given(given[f"targets[{m}]"], cuts["targets"]),
                },
                {f"loss[{m}]": Result(case.loss_shape(m), cuts["loss"], loss_dtype)},
                Given(given[f"loss[{m}].grad"], cuts["loss"], dtype=loss_dtype),
            )
            for m in range(len(case.leading))
        ],
        replica_axes=case.replica_axes,
        backward=case.backward,
        transposed=case.transposed,
    )
    if case.invalid:
        return attempt(exercise, lambda: candidate.cross_entropy(case))
    with phase("its declarations"):
        due = tuple(candidate.traffic(case, needed(case)))
    return replace(drive(exercise, lambda: candidate.cross_entropy(case), context.traffic), due=due)


def judge(case: CrossEntropyCase, description: Description, want: dict[str, Want], worlds: Sequence[World]) -> Verdict:
    """Every loss and gradient against one process, then replicas against each other, then the traffic."""
    if case.invalid:
        what = f"targets with {case.out_of_range}, not in a vocabulary of {case.vocabulary}"
        return judge_refusal(case.mesh, worlds[0], what)
    given = tensors(case)
    losses = [name for name in want if name.startswith("loss")]
    forms = forms_of(want, layouts(case, description.uneven), case.format, losses, worlds[0][0])

    def known(name: str) -> list[Suspect]:
        return list(suspects(case, given, name, description.uneven))

    others = {**given, **expected(case, given)}
    why = explanation(forms, case.mesh, worlds[0], others, len(case.leading), known)
    verdict = judge_tensors(want, forms, case.mesh, worlds[0], why)
    traffic = judge_traffic(case.mesh, needed(case), worlds[0])
    return replace(verdict, findings=(*verdict.findings, *traffic))


def _expected(case: CrossEntropyCase, careful: bool = False) -> dict[str, Want]:
    if case.invalid:
        return {}
    given = tensors(case)
    return wanted(
        False,
        case.format,
        lambda: expected(case, given),
        given,
        idle=[] if case.trains else [name for name in given if name.endswith(".grad")],
        careful=careful,
    )


CROSS_ENTROPY = Property(
    subject="cross_entropy",
    case_type=CrossEntropyCase,
    methods=("cross_entropy",),
    features=strategies.cross_entropy.FEATURES,
    cases=strategies.cross_entropy.cases,
    simpler=strategies.cross_entropy.simpler,
    world=lambda case: case.mesh.size,
    axes=("tp",),
    on_rank="harness.properties.cross_entropy:on_rank",
    expected=_expected,
    careful=lambda case: _expected(case, careful=True),
    judge=judge,
)
