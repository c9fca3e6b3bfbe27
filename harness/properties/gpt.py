"""GPT: one step over tensor-, pipeline- and data-parallel ranks gives the loss and all gradients of one process on the
whole batch, within a computed tolerance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import strategies.gpt
from harness.candidate import NotOffered
from harness.find import Spec
from harness.gpt_steps import run
from harness.observation import Observation
from harness.properties.base import Description, Property, World
from harness.properties.gpt_dropout import judge_with_masks
from harness.properties.gpt_suspects import suspects
from harness.properties.modules import explanation, forms_of, wanted
from harness.properties.tensors import Form, Want, judge_tensors
from harness.session import Session
from harness.verdict import Finding, Verdict
from harness.world import RankContext
from reference.gpt import MODEL_AXES, GptCase
from reference.gpt_dropout import Masks
from reference.gpt_parameters import EMBEDDING, OUTPUT, shapes, tensors
from reference.gpt_step import expected
from reference.layout import Layout, Split, Whole, window, with_each


def on_rank(context: RankContext, spec: Spec, case: GptCase) -> Observation:
    """Builds this rank's part of the model, and has it take a step."""
    candidate = Session.of(context, spec).on(case.mesh)
    if not candidate.offers("gpt"):
        raise NotOffered(f"{spec.text} has no gpt")
    return run(case, context.rank, lambda: candidate.gpt(case))


def judge(case: GptCase, description: Description, want: dict[str, Want], worlds: Sequence[World]) -> Verdict:
    """The loss and every gradient, or updated parameter, against one process; then the copies of a tied weight."""
    seen, given = worlds[0], tensors(case)
    in_fp32 = ["loss"]
    if case.main_grad:
        in_fp32 += [f"{name}.grad" for name in shapes(case)]
    found = forms_of(_names(case), loss_cut(case), case.format, in_fp32, seen[0])
    forms = {name: Form(_each(case, form.layout), form.dtype) for name, form in found.items()}

    def against(want: dict[str, Want], kept: Masks) -> Verdict:
        known = (lambda name: suspects(case, given, name)) if not case.dropout else lambda name: ()
        why = explanation(
            forms, case.mesh, seen, expected(case, given, kept), case.micro_batches, known,
            {"query heads that share a key-value head": case.heads // case.kv_heads, "layers": case.layers},
        )  # fmt: skip
        return judge_tensors(want, forms, case.mesh, seen, why)

    if case.dropout:
        verdict = judge_with_masks(case, seen, lambda kept, careful: against(_wanted(case, kept[0], careful), kept[0]))
    else:
        verdict = against(want, {})
    ending = "" if case.update == "sharded" else ".grad"
    return replace(verdict, findings=(*verdict.findings, *copies_differ(case, seen, ending)))


def loss_cut(case: GptCase) -> dict[str, Layout]:
    """The ranks of the last stage have it."""
    last = case.mesh.axis_size("pp") - 1
    return {"loss": Split(0, "pp", tuple(int(c == last) for c in range(last + 1)))}


def _each(case: GptCase, layout: Layout) -> Layout:
    return with_each(layout, case.replica_axes)


def copies_differ(case: GptCase, seen: World, ending: str) -> Iterator[Finding]:
    """Both copies of a tied weight must have the same bits, or they drift apart. Where the weight is cut over dp, these
    are the copies of the same part. ending: of the names of the tensors to compare."""
    if not case.tied:
        return
    first: dict[tuple[object, ...], tuple[str, int, bytes]] = {}
    for name in (EMBEDDING, OUTPUT):
        for rank, one in enumerate(seen):
            found = one.tensors.get(name + ending)
            if found is None or found.values is None or not found.values.size:
                continue
            layout = one.layouts.get(name + ending, one.layouts.get(name, Whole()))
            part = window(shapes(case)[name], layout, case.mesh, rank).ranges
            place = case.mesh.coordinate(rank, "tp"), case.mesh.coordinate(rank, case.replica_axes), part
            bits = (found.values + 0.0).tobytes()
            other, holder, right = first.setdefault(place, (name, rank, bits))
            if right != bits:
                places = f"{case.mesh.describe(holder)} and {case.mesh.describe(rank)}"
                both = f"{other}{ending} and {name}{ending}"
                message = f"{both} are copies of one weight on {places}, but their bits differ"
                yield Finding("disagree", message, rank, case.mesh.describe(rank), name + ending)
                return


def _names(case: GptCase) -> list[str]:
    """Of what is compared."""
    return ["loss", *(name if case.update == "sharded" else f"{name}.grad" for name in shapes(case))]


def _expected(case: GptCase, careful: bool = False) -> dict[str, Want]:
    """Nothing where the masks are to be seen first."""
    return {} if case.dropout else _wanted(case, {}, careful)


def _wanted(case: GptCase, kept: Masks, careful: bool) -> dict[str, Want]:
    given = tensors(case)
    return wanted(False, case.format, lambda: expected(case, given, kept), given, careful=careful)


GPT = Property(
    subject="gpt",
    case_type=GptCase,
    methods=("gpt",),
    features=strategies.gpt.FEATURES,
    cases=strategies.gpt.cases,
    simpler=strategies.gpt.simpler,
    world=lambda case: case.mesh.size,
    axes=MODEL_AXES,
    on_rank="harness.properties.gpt:on_rank",
    expected=_expected,
    careful=lambda case: None if case.dropout else _expected(case, careful=True),
    judge=judge,
)
