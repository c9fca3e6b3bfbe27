"""Collectives: each differentiable collective and its conjugate equal one process, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import strategies.collectives
from harness.candidate import NotOffered
from harness.drive import drive
from harness.exercise import Exercise, Given, MicroBatch, Names, Result
from harness.find import Spec
from harness.observation import Observation
from harness.oracle.patterns.evidence import Suspect
from harness.properties.base import Description, Property, World
from harness.properties.modules import explanation, forms_of, wanted
from harness.properties.tensors import Want, judge_tensors
from harness.properties.traffic import judge_traffic
from harness.session import Session, phase
from harness.verdict import Verdict
from harness.world import RankContext
from reference.collectives import CollectivesCase, Tensors, expected, global_shape, layouts, tensors
from reference.collectives_traffic import needed

_NAMES = Names(parameters=(), inputs=("input",), outputs=("output",))


def on_rank(context: RankContext, spec: Spec, case: CollectivesCase) -> Observation:
    """Runs the collective on this rank."""
    candidate = Session.of(context, spec).on(case.mesh)
    if not candidate.offers("collective"):
        raise NotOffered(f"{spec.text} has no collective")
    given, cuts = tensors(case), layouts(case, candidate.uneven)
    exercise = Exercise(
        mesh=case.mesh,
        rank=context.rank,
        dtype=case.format.torch_dtype,
        names=_NAMES,
        parameters={},
        micro_batches=[
            MicroBatch(
                {f"input[{m}]": Given(given[f"input[{m}]"], cuts["input"], case.input_requires_grad)},
                {f"output[{m}]": Result(global_shape(case, "output", shape), cuts["output"])},
                Given(given[f"output[{m}].grad"], cuts["output"]),
            )
            for m, shape in enumerate(case.shapes)
        ],
        replica_axes=case.replica_axes,
        backward=case.backward,
        transposed=case.transposed,
    )
    with phase("its declarations"):
        due = tuple(candidate.traffic(case, needed(case)))
    return replace(drive(exercise, lambda: candidate.collective(case), context.traffic), due=due)


def judge(case: CollectivesCase, description: Description, want: dict[str, Want], worlds: Sequence[World]) -> Verdict:
    """Outputs and gradients against one process, replicas against each other, then the traffic."""
    given, seen = tensors(case), worlds[0]
    forms = forms_of(want, layouts(case, description.uneven), case.format, (), seen[0])

    def suspects(name: str) -> list[Suspect]:
        return list(_suspects(case, given, name))

    others = {**given, **expected(case, given)}
    why = explanation(forms, case.mesh, seen, others, len(case.shapes), suspects)
    verdict = judge_tensors(want, forms, case.mesh, seen, why)
    return replace(verdict, findings=(*verdict.findings, *judge_traffic(case.mesh, needed(case), seen)))


def _suspects(case: CollectivesCase, given: Tensors, name: str) -> Iterator[Suspect]:
    """A conjugate that is not one: the sum left out, or done where it is not due."""
    n, axis = case.parallel_size, case.axis
    right = expected(case, given).get(name)
    if right is None or n == 1:
        return
    backward = name.endswith(".grad")
    where = "backward" if backward else "forward"
    yield Suspect(f"is {n} times too large: {where} sums over {axis} what is alike on all its ranks", n * right.numpy())
    yield Suspect(f"is divided by {n}: {where} averages over {axis} where the sum is due", right.numpy() / n)
    own = given[f"output[{_number(name)}].grad" if backward else f"input[{_number(name)}]"].numpy()
    if own.shape[0] == case.mesh.size != right.shape[0]:
        ranks = range(case.mesh.size)
        alone = tuple(own[case.mesh.coordinate(rank, case.mesh.names)][None] for rank in ranks)
        stretched = tuple(alone[rank].repeat(right.shape[0], 0) for rank in ranks)
        yield Suspect(f"equals the rank's own part before the sum over {axis}: it is not reduced", stretched)


def _number(name: str) -> int:
    return int(name.partition("[")[2].partition("]")[0])


def _expected(case: CollectivesCase, careful: bool = False) -> dict[str, Want]:
    given = tensors(case)
    idle = [] if case.trains else [name for name in given if name.endswith(".grad")]
    return wanted(case.exact, case.format, lambda: expected(case, given), given, idle, careful)


COLLECTIVES = Property(
    subject="collectives",
    case_type=CollectivesCase,
    methods=("collective",),
    features=strategies.collectives.FEATURES,
    cases=strategies.collectives.cases,
    simpler=strategies.collectives.simpler,
    world=lambda case: case.mesh.size,
    on_rank="harness.properties.collectives:on_rank",
    expected=_expected,
    careful=lambda case: None if case.exact else _expected(case, careful=True),
    judge=judge,
)
