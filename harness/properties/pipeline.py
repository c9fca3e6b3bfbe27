"""Pipelines: gradients and losses of p stages equal one process on the whole batch, whatever the schedule and however
the batch is cut, with the bits of one process that adds up the same micro-batches, recomputed or stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import strategies.pipeline
import strategies.pipeline_simpler
from harness.candidate import NotOffered
from harness.find import Spec
from harness.observation import REFUSED, Observation
from harness.pipeline_steps import BITS, DRAWS, IN_FLIGHT, attempt, run
from harness.properties.base import Description, Property, World
from harness.properties.modules import explanation, forms_of, wanted
from harness.properties.pipeline_suspects import suspects, without_tying
from harness.properties.pipeline_traffic import judge_borders
from harness.properties.refusal import judge_refusal
from harness.properties.tensors import Want, judge_tensors, other_bits
from harness.session import Session
from harness.stages import PLANTED
from harness.verdict import Finding, Verdict
from harness.world import RankContext
from reference.layout import Each, Layout, Split
from reference.pipeline import PipelineCase
from reference.pipeline_gradients import expected
from reference.pipeline_stages import blocks_of, exact, parameters, tensors, tied
from reference.pipeline_traffic import most_in_flight

#: A candidate that adds gradients in the order of the micro-batches has the bits of one process.
SAME_BITS = "pipeline_same_bits"


def on_rank(context: RankContext, spec: Spec, case: PipelineCase) -> Observation:
    """Has this rank's stages run, or sees whether they are refused."""
    candidate = Session.of(context, spec).on(case.mesh)
    if not candidate.offers("pipeline"):
        raise NotOffered(f"{spec.text} has no pipeline")
    given = tensors(case)
    if case.invalid:
        return attempt(case, given, context.rank, lambda stages: candidate.pipeline(case, stages))
    return run(case, given, context.rank, lambda stages: candidate.pipeline(case, stages), context.traffic)


def runs(case: PipelineCase, description: Description) -> Sequence[PipelineCase]:
    """With recomputation, also without it."""
    return (case, replace(case, recompute=False)) if case.recompute and not case.invalid else (case,)


def judge(case: PipelineCase, description: Description, want: dict[str, Want], worlds: Sequence[World]) -> Verdict:
    """Every gradient, parameter and loss against one process, then bits, then what is kept and what is sent."""
    seen = worlds[0]
    if case.invalid:
        return _judge_invalid(case, seen)
    given = tensors(case)
    in_fp32 = [name for name in want if name.startswith("loss")]
    forms = forms_of(want, _cuts(case), case.format, in_fp32, seen[0])
    others = {} if case.drops else expected(case, given)
    why = explanation(forms, case.mesh, seen, others, case.micro_batches, lambda name: suspects(case, given, name))
    verdict = judge_tensors(want, forms, case.mesh, seen, why)
    findings = (
        *without_tying(verdict.findings, [block.copy for block in tied(case)]),
        *_copies_differ(case, seen),
        *(_other_bits(case, seen) if SAME_BITS in description.supports else ()),
        *_draws_again(case, seen),
        *(other_bits(case.mesh, worlds, "with recomputation") if len(worlds) > 1 else ()),
        *_too_many_in_flight(case, seen),
        *judge_borders(case, seen),
    )
    return replace(verdict, findings=findings)


_INVALID = {
    "no_micro_batches": "a batch of no micro-batches",
    "small_batch": "more micro-batches than samples",
    "chunks": "another number of stages on the last rank",
    "shape": "a border on whose two sides the stages differ in shape",
    "dtype": "a border on whose two sides the stages differ in dtype",
    "raises": "a stage that raises",
}


def _judge_invalid(case: PipelineCase, seen: World) -> Verdict:
    assert case.invalid is not None
    verdict = judge_refusal(case.mesh, seen, _INVALID[case.invalid])
    if verdict.findings or case.invalid != "raises":
        return verdict
    for rank, one in enumerate(seen):
        if PLANTED not in str(one.facts[REFUSED]):
            place = case.mesh.describe(rank)
            message = f"a stage raised, and {place} ends with another error: {str(one.facts[REFUSED]).splitlines()[0]}"
            return Verdict((Finding("disagree", message, rank, place),))
    return verdict


def _cuts(case: PipelineCase) -> dict[str, Layout]:
    """One rank along the axis has all of a parameter, the others nothing."""
    p, found = case.parallel_size, dict[str, Layout]()
    each = () if case.update == "sharded" else (Each(case.replica_axes),)
    for name, one in parameters(case).items():
        sizes = tuple(one.shape[0] * (c == case.coordinate_of(one.stage)) for c in range(p))
        found[name] = (*each, Split(0, case.axis, sizes))
    last = tuple(int(c == case.coordinate_of(case.stages - 1)) for c in range(p))
    found["loss"] = (Each(case.replica_axes), Split(0, case.axis, last))
    return found


def _copies_differ(case: PipelineCase, seen: World) -> Iterator[Finding]:
    """All copies of a tied weight must have the same bits, or they drift apart. A sharded optimizer adds the gradients
    of more than two pipelines in an order that depends on where a copy lies in its buffer: then only where nothing
    rounds."""
    if case.update == "sharded" and case.replicas > 2 and not exact(case):
        return
    copies = [block.copy for block in tied(case)]
    for step in range(case.steps):
        ending = f"[{step}]" if case.update == "sharded" else f"[{step}].grad"
        first: dict[int, tuple[str, int, bytes]] = {}
        for name in copies:
            for rank, one in enumerate(seen):
                found = one.tensors.get(name + ending)
                if found is None or found.values is None or not found.values.size:
                    continue
                replica = 0 if case.update == "sharded" else case.mesh.coordinate(rank, case.replica_axes)
                other, holder, bits = first.setdefault(replica, (name, rank, (found.values + 0.0).tobytes()))
                if bits != (found.values + 0.0).tobytes():
                    places = f"{case.mesh.describe(holder)} and {case.mesh.describe(rank)}"
                    both = f"{other}{ending} and {name}{ending}"
                    message = f"{both} are copies of one weight on {places}, but their bits differ"
                    yield Finding("disagree", message, rank, case.mesh.describe(rank), name + ending)
                    return


def _other_bits(case: PipelineCase, seen: World) -> Iterator[Finding]:
    if case.chunks > 1 and (case.drops or case.schedule == "gpipe"):
        # How the stages of a rank share its random numbers is up to the schedule, and GPipe may go backwards through
        # the micro-batches.
        return
    for rank, one in enumerate(seen):
        for name in one.facts[BITS]:
            place = case.mesh.describe(rank)
            message = f"{name} has other bits on {place} than in one process that adds up the same micro-batches"
            yield Finding("mismatch", message, rank, place, name)
            return


def _draws_again(case: PipelineCase, seen: World) -> Iterator[Finding]:
    """Every micro-batch has masks of its own, and recomputation has those of the first time."""
    for rank, one in enumerate(seen):
        for stage, drawn in one.facts[DRAWS].items():
            blocks = sum(block.kind == "dropout" for block in blocks_of(case, stage))
            due = blocks * case.micro_batches * case.steps
            if drawn != due:
                again = "recomputation draws others" if drawn > due else "micro-batches share them"
                message = f"stage {stage} has {drawn} different dropout masks, where {due} are due: {again}"
                yield Finding("mismatch", message, rank, case.mesh.describe(rank))
                return


def _too_many_in_flight(case: PipelineCase, seen: World) -> Iterator[Finding]:
    for rank, one in enumerate(seen):
        most = most_in_flight(case, case.mesh.coordinate(rank, case.axis))
        if most is None or one.facts[IN_FLIGHT] <= most:
            continue
        place = case.mesh.describe(rank)
        message = (
            f"{place} has {one.facts[IN_FLIGHT]} micro-batches in flight, where {case.schedule} with "
            f"{case.micro_batches} micro-batches needs no more than {most}"
        )
        yield Finding("mismatch", message, rank, place)
        return


def _expected(case: PipelineCase, careful: bool = False) -> dict[str, Want]:
    given = tensors(case)
    idle = [name for name in given if name.startswith("ids") and case.stages == 1]  # they cross borders
    return wanted(exact(case), case.format, lambda: expected(case, given), given, idle, careful)


def _nothing(case: PipelineCase) -> bool:
    return case.invalid is not None or case.drops


PIPELINE = Property(
    subject="pipeline",
    case_type=PipelineCase,
    methods=("pipeline",),
    features=strategies.pipeline.FEATURES,
    cases=strategies.pipeline.cases,
    simpler=strategies.pipeline_simpler.simpler,
    world=lambda case: case.mesh.size,
    on_rank="harness.properties.pipeline:on_rank",
    expected=lambda case: {} if _nothing(case) else _expected(case),
    careful=lambda case: None if _nothing(case) or exact(case) else _expected(case, careful=True),
    judge=judge,
    runs=runs,
)
