"""Linear: outputs and gradients equal one process, bit by bit on lattice data; the traffic is what is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

import strategies.linear
from harness.candidate import NotOffered
from harness.drive import drive
from harness.exercise import Exercise, Given, MicroBatch, Names, Outputs, Result
from harness.find import Spec
from harness.observation import Observation
from harness.oracle.diagnose import Diagnosis
from harness.properties import initial
from harness.properties.base import Description, Property, World
from harness.properties.linear_suspects import explain
from harness.properties.modules import forms_of, wanted
from harness.properties.tensors import Want, judge_tensors
from harness.properties.traffic import judge_traffic
from harness.session import Session, phase
from harness.verdict import Finding, Verdict
from harness.world import RankContext
from reference.layout import Each, Layout, Split, Whole, placements
from reference.linear import LinearCase, expected, tensors
from reference.linear_traffic import needed

_NAMES = Names(parameters=("weight", "bias"), inputs=("input",), outputs=("output", "output_bias"))


def layouts(case: LinearCase, uneven: str = "balanced") -> dict[str, Layout]:
    """How each tensor that goes in or comes out is cut, by its base name."""
    each = Each(case.replica_axes)
    features = Split(-1, case.axis, rule="chunk" if uneven == "chunk" else "balanced")
    sequence = Split(0, case.axis, rule=features.rule)
    column = case.kind == "column"
    if case.sequence_parallel:
        inside, outside = sequence, features
        entering, leaving = (inside, outside) if column else (outside, inside)
        return {
            "input": (each, entering),
            "output": (each, leaving),
            "output_bias": _bias(case, each, features),
        }
    whole = Whole()
    entering_plain: Layout = whole if column or not case.input_is_parallel else features
    leaving_plain: Layout = features if column and not case.gather_output else whole
    return {
        "input": (each, *placements(entering_plain)),
        "output": (each, *placements(leaving_plain)),
        "output_bias": _bias(case, each, features),
    }


def _bias(case: LinearCase, each: Each, features: Split) -> Layout:
    return (each, features) if case.kind == "column" and not case.gather_output else (each,)


def on_rank(context: RankContext, spec: Spec, run: LinearCase | initial.Alone) -> Observation:
    """Builds the layer and drives it on this rank."""
    case: LinearCase = initial.case_of(run)
    candidate = Session.of(context, spec).on(case.mesh)
    if not candidate.offers(f"{case.kind}_linear"):
        raise NotOffered(f"{spec.text} has no {case.kind}_linear")
    build = candidate.column_linear if case.kind == "column" else candidate.row_linear
    exercise = replace(_exercise(case, candidate.uneven, context.rank), only_initial=isinstance(run, initial.Alone))
    with phase("its declarations"):
        due = tuple(candidate.traffic(case, needed(case)))
    return replace(drive(exercise, lambda: build(case), context.traffic), due=due)


def _exercise(case: LinearCase, uneven: str, rank: int) -> Exercise:
    given, cuts = tensors(case), layouts(case, uneven)
    parameters = {"weight": Given(given["weight"], Whole(), case.weight_requires_grad)}
    if case.bias:
        parameters["bias"] = Given(given["bias"], Whole(), case.bias_requires_grad)
    micro_batches = []
    for m, dims in enumerate(case.leading):
        outputs = {f"output[{m}]": Result((case.replicas, *dims, case.out_features), cuts["output"])}
        if case.bias and case.skip_bias_add:
            outputs[f"output_bias[{m}]"] = Result((case.replicas, case.out_features), cuts["output_bias"])
        inputs = {f"input[{m}]": Given(given[f"input[{m}]"], cuts["input"], case.input_requires_grad)}
        micro_batches.append(MicroBatch(inputs, outputs, Given(given[f"output[{m}].grad"], cuts["output"])))
    return Exercise(
        mesh=case.mesh,
        rank=rank,
        dtype=case.format.torch_dtype,
        names=_NAMES,
        parameters=parameters,
        micro_batches=micro_batches,
        replica_axes=case.replica_axes,
        backward=case.backward,
        consume=_add_bias if case.bias and case.skip_bias_add else _only,
        transposed=case.transposed,
        main_grad=case.main_grad,
    )


def _only(outputs: Outputs) -> torch.Tensor:
    return outputs[0]


def _add_bias(outputs: Outputs) -> torch.Tensor:
    """What the caller of a layer with skip_bias_add does later, in a fused operation."""
    return outputs[0] + outputs[1]


def judge(
    case: LinearCase,
    description: Description,
    want: dict[str, Want],
    worlds: Sequence[World],
) -> Verdict:
    """Every output and gradient against one process, then replicas against each other, then the initialisation."""
    observed, cuts = worlds[0], layouts(case, description.uneven)
    main_grads = ("weight.grad", "bias.grad") if case.main_grad else ()
    forms = forms_of(want, cuts, case.format, main_grads, observed[0])

    def why(name: str, values: np.ndarray, tolerance: np.ndarray | None) -> Diagnosis | None:
        form = forms[name]
        return explain(case, description, name, observed, form.layout, values, tolerance, form.dtype)

    verdict = judge_tensors(want, forms, case.mesh, observed, why)
    traffic = judge_traffic(case.mesh, needed(case), observed)
    return replace(verdict, findings=(*verdict.findings, *_initial(case, description, worlds), *traffic))


def _initial(case: LinearCase, description: Description, worlds: Sequence[World]) -> Iterator[Finding]:
    if not case.init:
        return

    def why(name: str, layout: Layout, whole: np.ndarray) -> Diagnosis | None:
        dtype = str(case.format.torch_dtype).removeprefix("torch.")
        return explain(case, description, name, worlds[0], layout, whole, None, dtype)

    shapes = {"weight": (case.out_features, case.in_features)} | ({"bias": (case.out_features,)} if case.bias else {})
    yield from initial.judge_initial(case.mesh, case.format, shapes, worlds, why)


def _expected(case: LinearCase, careful: bool = False) -> dict[str, Want]:
    given = tensors(case)
    idle = () if case.trained else [name for name in given if name.endswith(".grad")]
    return wanted(case.exact, case.format, lambda: expected(case, given), given, idle, careful)


LINEAR = Property(
    subject="linear",
    case_type=LinearCase,
    methods=("column_linear", "row_linear"),
    features=strategies.linear.FEATURES,
    cases=strategies.linear.cases,
    simpler=strategies.linear.simpler,
    world=lambda run: run.mesh.size,
    axes=("tp",),
    on_rank="harness.properties.linear:on_rank",
    expected=_expected,
    careful=lambda case: None if case.exact else _expected(case, careful=True),
    judge=judge,
    runs=initial.runs,
)
