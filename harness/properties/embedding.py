"""Embedding: outputs and the table's gradient equal one process; ids out of range are refused on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

import strategies.embedding
from harness.candidate import NotOffered
from harness.drive import attempt, drive
from harness.exercise import Exercise, Given, MicroBatch, Names, Result
from harness.find import Spec
from harness.observation import Observation
from harness.oracle.patterns.evidence import Suspect
from harness.properties import initial
from harness.properties.base import Description, Property, World
from harness.properties.modules import explanation, forms_of, wanted
from harness.properties.refusal import judge_refusal
from harness.properties.tensors import Want, judge_tensors
from harness.properties.traffic import judge_traffic
from harness.session import Session, phase
from harness.verdict import Verdict
from harness.world import RankContext
from reference.embedding import EmbeddingCase, Tensors, expected, tensors
from reference.embedding_traffic import needed
from reference.layout import Each, Layout, Rule, Split, Whole, cut

_NAMES = Names(parameters=("weight",), inputs=("input",), outputs=("output",))


def layouts(case: EmbeddingCase, uneven: Rule = "balanced") -> dict[str, Layout]:
    """How each tensor that goes in or comes out is cut, by its base name."""
    each = Each(case.replica_axes)
    sequence = Split(0, case.axis, rule=uneven)
    return {"input": (each,), "output": (each, sequence) if case.sequence_parallel else (each,)}


def on_rank(context: RankContext, spec: Spec, run: EmbeddingCase | initial.Alone) -> Observation:
    """Builds the embedding and drives it on this rank, or sees whether it refuses."""
    case: EmbeddingCase = initial.case_of(run)
    candidate = Session.of(context, spec).on(case.mesh)
    if not candidate.offers("embedding"):
        raise NotOffered(f"{spec.text} has no embedding")
    given, cuts = tensors(case), layouts(case, candidate.uneven)
    exercise = Exercise(
        mesh=case.mesh,
        rank=context.rank,
        dtype=case.format.torch_dtype,
        names=_NAMES,
        parameters={"weight": Given(given["weight"], Whole(), case.weight_requires_grad)},
        micro_batches=[
            MicroBatch(
                {f"input[{m}]": Given(given[f"input[{m}]"], cuts["input"])},
                {f"output[{m}]": Result((case.replicas, *dims, case.hidden), cuts["output"])},
                Given(given[f"output[{m}].grad"], cuts["output"]),
            )
            for m, dims in enumerate(case.leading)
        ],
        replica_axes=case.replica_axes,
        backward=case.backward,
        transposed=case.transposed,
        main_grad=case.main_grad,
        only_initial=isinstance(run, initial.Alone),
    )
    if case.invalid:
        return attempt(exercise, lambda: candidate.embedding(case))
    with phase("its declarations"):
        due = tuple(candidate.traffic(case, needed(case)))
    return replace(drive(exercise, lambda: candidate.embedding(case), context.traffic), due=due)


def judge(case: EmbeddingCase, description: Description, want: dict[str, Want], worlds: Sequence[World]) -> Verdict:
    """Every output and the gradient against one process, then replicas against each other, then the initialisation."""
    if case.invalid:
        return judge_refusal(case.mesh, worlds[0], f"ids with a token {_out_of_range(case)}")
    given = tensors(case)
    main_grads = ("weight.grad",) if case.main_grad else ()
    cuts = layouts(case, description.uneven)
    forms = forms_of(want, cuts, case.format, main_grads, worlds[0][0])

    def suspects(name: str) -> list[Suspect]:
        return list(_suspects(case, given, name, description.uneven))

    others = {**given, **expected(case, given)}
    why = explanation(forms, case.mesh, worlds[0], others, len(case.leading), suspects)
    verdict = judge_tensors(want, forms, case.mesh, worlds[0], why)
    traffic = judge_traffic(case.mesh, needed(case), worlds[0])
    shapes = {"weight": (case.rows, case.hidden)} if case.init else {}
    first = initial.judge_initial(case.mesh, case.format, shapes, worlds)
    return replace(verdict, findings=(*verdict.findings, *first, *traffic))


def _out_of_range(case: EmbeddingCase) -> str:
    return "-1" if case.invalid == "negative" else f"{case.vocabulary}, the vocabulary's size"


def _suspects(case: EmbeddingCase, given: Tensors, name: str, uneven: Rule) -> Iterator[Suspect]:
    """What the known mistakes give for an output or the table's gradient."""
    ends = np.cumsum([0, *cut(case.rows, case.parallel_size, uneven)])
    base, _, rest = name.partition("[")
    weight = given["weight"].numpy()
    if base == "output":
        ids = given[f"input[{int(rest.partition(']')[0])}]"].numpy()
        looked_up = weight[ids]
        per_coordinate, clamped = [], []
        for start, end in itertools.pairwise(ends):
            mine = ((ids >= start) & (ids < end))[..., None]
            per_coordinate.append(np.where(mine, looked_up, 0.0))
            if end > start:
                clamped.append(np.where(mine, looked_up, weight[start]))
        yield Suspect(
            f"equals the rank's own rows alone, zero for tokens elsewhere: the all-reduce over {case.axis} is missing",
            tuple(per_coordinate[case.mesh.coordinate(rank, case.axis)] for rank in range(case.mesh.size)),
        )
        if len(clamped) == case.parallel_size:
            yield Suspect(
                "adds a row of the rank's own for every token that is elsewhere: they are not masked", sum(clamped)
            )
        floor = case.rows // case.parallel_size * case.parallel_size
        yield Suspect(
            "is zero for the last rows, which rows // ranks does not reach: the vocabulary is split by floor",
            np.where((ids < floor)[..., None], looked_up, 0.0),
        )
    elif case.padding_idx is not None and name == "weight.grad":
        whole = expected(case, given)["weight.grad"]
        assert whole is not None
        wrong = whole.numpy().copy()
        for start in ends[:-1]:
            wrong[:, min(start + case.padding_idx, case.rows - 1)] = 0
        yield Suspect("lacks the row of padding_idx on every rank: the global index is applied to each shard", wrong)


def _expected(case: EmbeddingCase, careful: bool = False) -> dict[str, Want]:
    if case.invalid:
        return {}
    given = tensors(case)
    return wanted(
        case.exact,
        case.format,
        lambda: expected(case, given),
        given,
        idle=[] if case.trains else [name for name in given if name.endswith(".grad")],
        careful=careful,
    )


EMBEDDING = Property(
    subject="embedding",
    case_type=EmbeddingCase,
    methods=("embedding",),
    features=strategies.embedding.FEATURES,
    cases=strategies.embedding.cases,
    simpler=strategies.embedding.simpler,
    world=lambda case: case.mesh.size,
    axes=("tp",),
    on_rank="harness.properties.embedding:on_rank",
    expected=_expected,
    careful=lambda case: None if case.exact else _expected(case, careful=True),
    judge=judge,
    runs=initial.runs,
)
