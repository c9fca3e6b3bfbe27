"""Transformer: outputs and all gradients of a layer equal one process within a computed tolerance; with dropout, one
process that drops the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import strategies.transformer
from harness.candidate import NotOffered
from harness.drive import drive
from harness.exercise import Exercise, Given, MicroBatch, Names, Result
from harness.find import Spec
from harness.observation import Observation
from harness.oracle.diagnose import Diagnosis
from harness.properties import initial
from harness.properties.base import Description, Property, World
from harness.properties.dropout import MASKS, judge_alone, judge_masks, judge_recomputed, read_masks
from harness.properties.modules import Values, explanation, forms_of, one_thread, wanted
from harness.properties.tensors import Want, judge_tensors
from harness.properties.traffic import judge_traffic
from harness.properties.transformer_dropout import judge_values, mask_results
from harness.properties.transformer_suspects import suspects
from harness.session import Session, phase
from harness.verdict import Verdict
from harness.world import RankContext
from reference.layout import Each, Layout, Split, Whole
from reference.mesh import Mesh
from reference.transformer import TransformerCase, expected, shapes, tensors
from reference.transformer_traffic import needed
from strategies.transformer import recomputations

_WITH_EVERYTHING = TransformerCase(Mesh.of(tp=1), 1, 1, 1, 1, bias=True, activation="swiglu", qk_norm=True)
_NAMES = Names(parameters=tuple(shapes(_WITH_EVERYTHING)), inputs=("input",), outputs=("output",))


def layouts(case: TransformerCase) -> dict[str, Layout]:
    """How inputs and outputs are cut."""
    each = Each(case.replica_axes)
    cut = (each, Split(0, case.axis)) if case.sequence_parallel else (each,)
    return {"input": cut, "output": cut}


def on_rank(context: RankContext, spec: Spec, run: TransformerCase | initial.Alone) -> Observation:
    """Builds the layer and drives it on this rank; with dropout, asks for its masks too."""
    case: TransformerCase = initial.case_of(run)
    candidate = Session.of(context, spec).on(case.mesh)
    if not candidate.offers("transformer_layer"):
        raise NotOffered(f"{spec.text} has no transformer_layer")
    with phase("its declarations"):
        due = tuple(candidate.traffic(case, needed(case)))
    exercise = replace(_exercise(case, context.rank), only_initial=isinstance(run, initial.Alone))
    seen = drive(exercise, lambda: candidate.transformer_layer(case), context.traffic)
    return replace(seen, due=due, facts={**seen.facts, MASKS: read_masks(candidate, case)} if case.dropout else {})


def _exercise(case: TransformerCase, rank: int) -> Exercise:
    given, cuts = tensors(case), layouts(case)
    return Exercise(
        mesh=case.mesh,
        rank=rank,
        dtype=case.format.torch_dtype,
        names=_NAMES,
        parameters={name: Given(given[name], Whole(), requires_grad=True) for name in shapes(case)},
        micro_batches=[
            MicroBatch(
                {f"input[{m}]": Given(given[f"input[{m}]"], cuts["input"], case.input_requires_grad)},
                {f"output[{m}]": Result((case.replicas, *dims, case.hidden), cuts["output"])},
                Given(given[f"output[{m}].grad"], cuts["output"]),
                mask_results(case, m),
            )
            for m, dims in enumerate(case.leading)
        ],
        replica_axes=case.replica_axes,
        backward=case.backward,
        transposed=case.transposed,
        main_grad=case.main_grad,
    )


def runs(case: TransformerCase, description: Description) -> Sequence[TransformerCase | initial.Alone]:
    """With dropout, also the same layer that recomputes something else in backward, where the candidate has both; with
    ``init``, also the layer on one rank."""
    if not case.dropout:
        return initial.runs(case, description)
    other = next((kind for kind in ["none", *recomputations(description.supports)] if kind != case.recompute), None)
    return (case,) if other is None else (case, replace(case, recompute=other))


def judge(case: TransformerCase, description: Description, want: dict[str, Want], worlds: Sequence[World]) -> Verdict:
    """Every output and gradient against one process, then replicas against each other, then the initialisation. With
    dropout masks are judged too, and the second run."""
    shape = _shapes(case)
    main_grads = [f"{name}.grad" for name in shapes(case)] if case.main_grad else []
    forms = forms_of(list(shape), layouts(case), case.format, main_grads, worlds[0][0])
    if case.dropout:
        values = judge_values(case, forms, worlds[0])
        findings = [
            *judge_masks(case, worlds[0]),
            *(values.findings or judge_alone(shape, forms, case.mesh, worlds[0])),
            *(judge_recomputed(case, initial.case_of(runs(case, description)[1]), worlds) if len(worlds) > 1 else ()),
        ]
        return replace(values, findings=(*findings, *judge_traffic(case.mesh, needed(case), worlds[0])))

    def why(name: str, values: Values, tolerance: Values | None) -> Diagnosis | None:
        given = tensors(case)
        with one_thread():
            others = {**given, **expected(case, given)}
            explain = explanation(
                forms, case.mesh, worlds[0], others, len(case.leading), lambda name: suspects(case, given, name),
                {"query heads that share a key-value head": case.heads // case.kv_heads},
            )  # fmt: skip
            return explain(name, values, tolerance)

    verdict = judge_tensors(want, forms, case.mesh, worlds[0], why)
    traffic = judge_traffic(case.mesh, needed(case), worlds[0])
    first = initial.judge_initial(case.mesh, case.format, shapes(case) if case.init else {}, worlds)
    return replace(verdict, findings=(*verdict.findings, *first, *traffic))


def _shapes(case: TransformerCase) -> dict[str, tuple[int, ...] | None]:
    """The global shape of every result; None for what must not be there."""
    found: dict[str, tuple[int, ...] | None] = {}
    for m, dims in enumerate(case.leading):
        found[f"output[{m}]"] = (case.replicas, *dims, case.hidden)
    for name, shape in shapes(case).items():
        found[f"{name}.grad"] = (case.replicas, *shape) if case.trains else None
    for m, dims in enumerate(case.leading):
        there = case.trains and case.input_requires_grad
        found[f"input[{m}].grad"] = (case.replicas, *dims, case.hidden) if there else None
    return found


def _expected(case: TransformerCase, careful: bool = False) -> dict[str, Want]:
    if case.dropout:
        return {}
    given = tensors(case)
    idle = [] if case.trains else [name for name in given if name.endswith(".grad")]
    return wanted(False, case.format, lambda: expected(case, given), given, idle, careful)


TRANSFORMER = Property(
    subject="transformer",
    case_type=TransformerCase,
    methods=("transformer_layer",),
    features=strategies.transformer.FEATURES,
    cases=strategies.transformer.cases,
    simpler=strategies.transformer.simpler,
    world=lambda case: case.mesh.size,
    axes=("tp",),
    on_rank="harness.properties.transformer:on_rank",
    expected=_expected,
    careful=lambda case: None if case.dropout else _expected(case, careful=True),
    judge=judge,
    runs=runs,
    # torch.utils.checkpoint imports it at its first call, which takes a second.
    preload=("torch._dynamo",),
)
