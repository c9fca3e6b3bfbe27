"""Data parallelism: gradients and losses of n ranks equal one process on the whole batch, with the same bits on all
ranks, whether reduction overlaps with backward or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import strategies.data_parallel
from harness.candidate import NotOffered
from harness.find import Spec
from harness.observation import Observation
from harness.properties.base import Description, Property, World
from harness.properties.data_parallel_suspects import suspects
from harness.properties.data_parallel_traffic import judge_reductions
from harness.properties.modules import explanation, forms_of, wanted
from harness.properties.refusal import judge_refusal
from harness.properties.tensors import Want, judge_tensors, other_bits
from harness.session import Session, phase
from harness.train import NONE, attempt, train
from harness.verdict import Finding, Verdict
from harness.world import RankContext
from reference.data_parallel import DataParallelCase, idle, tensors, trained
from reference.data_parallel_gradients import expected
from reference.data_parallel_tokens import valid_tokens
from reference.data_parallel_traffic import needed
from reference.layout import Each, Layout


def on_rank(context: RankContext, spec: Spec, case: DataParallelCase) -> Observation:
    """Has the network wrapped and trains it on this rank, or sees whether it is refused."""
    candidate = Session.of(context, spec).on(case.mesh)
    if not candidate.offers("data_parallel"):
        raise NotOffered(f"{spec.text} has no data_parallel")
    given = tensors(case)
    if case.invalid:
        return attempt(case, given, context.rank, lambda module: candidate.data_parallel(case, module))
    with phase("its declarations"):
        due = tuple(candidate.traffic(case, needed(case)))
    seen = train(case, given, context.rank, lambda module: candidate.data_parallel(case, module), context.traffic)
    return replace(seen, due=due)


def runs(case: DataParallelCase, description: Description) -> Sequence[DataParallelCase]:
    """With overlap, also without it."""
    return (case, replace(case, overlap=False)) if case.overlap and not case.invalid else (case,)


def judge(case: DataParallelCase, description: Description, want: dict[str, Want], worlds: Sequence[World]) -> Verdict:
    """Every gradient and loss against one process, replicas against each other, the second run, then the traffic."""
    seen = worlds[0]
    if case.invalid:
        return judge_refusal(case.mesh, seen, f"parameters that differ in {case.invalid} on the last rank")
    given = tensors(case)
    reported = {name for one in seen for name in one.tensors if name.startswith("loss")}
    want = {name: one for name, one in want.items() if not name.startswith("loss") or name in reported}
    each: Layout = (Each(case.replica_axes),)
    cuts = dict.fromkeys(["loss", *trained(case), *_bases(want)], each)
    main_grads = [name for name in want if case.main_grad or name.startswith("loss")]
    forms = forms_of(want, cuts, case.format, main_grads, seen[0])
    why = explanation(
        forms, case.mesh, seen, expected(case, given), case.micro_batches, lambda name: suspects(case, given, name)
    )
    verdict = judge_tensors(want, forms, case.mesh, seen, why)
    findings = (
        *verdict.findings,
        *_missing(case, seen),
        *(other_bits(case.mesh, worlds, "with overlap") if len(worlds) > 1 else ()),
        *judge_reductions(case, needed(case), seen),
    )
    return replace(verdict, findings=findings)


def _bases(want: dict[str, Want]) -> list[str]:
    return [name.removesuffix(".grad").partition("[")[0] for name in want]


def _missing(case: DataParallelCase, seen: World) -> Iterator[Finding]:
    """A gradient that is None: of a parameter that no rank uses, or in a step without a token, it stands for zeros,
    where all ranks agree; of another it is missing."""
    none = [set(one.facts.get(NONE, ())) for one in seen]
    for rank, names in enumerate(none):
        for name in sorted(names):
            base, step = name.removesuffix(".grad").partition("[")[0], int(name.partition("[")[2].partition("]")[0])
            place = case.mesh.describe(rank)
            others = [other for other in range(len(seen)) if _same_group(case, rank, other) and name not in none[other]]
            if others:
                message = f"{name} is None on {place} and not on {case.mesh.describe(others[0])}"
                yield Finding("disagree", message, rank, place, name)
                return
            if base not in idle(case, step) and bool(valid_tokens(case, step).any()):
                message = f"{name} is None on {place}, although the parameter is used and trains"
                yield Finding("mismatch", message, rank, place, name)
                return


def _same_group(case: DataParallelCase, a: int, b: int) -> bool:
    return case.mesh.coordinate(a, case.replica_axes) == case.mesh.coordinate(b, case.replica_axes)


def _expected(case: DataParallelCase, careful: bool = False) -> dict[str, Want]:
    given = tensors(case)
    # What belongs to layers that nobody uses, and parameters of a loss that is linear, reach only some results.
    unused = [i for i in range(len(case.layers)) if not case.ever_used(i)]
    theirs = {f"{what}{i}" for i in unused for what in ("weight", "bias", "coefficient")}
    without = [name for name in given if name in theirs]
    return wanted(case.exact, case.format, lambda: expected(case, given), given, without, careful)


DATA_PARALLEL = Property(
    subject="data_parallel",
    case_type=DataParallelCase,
    methods=("data_parallel",),
    features=strategies.data_parallel.FEATURES,
    cases=strategies.data_parallel.cases,
    simpler=strategies.data_parallel.simpler,
    world=lambda case: case.mesh.size,
    on_rank="harness.properties.data_parallel:on_rank",
    expected=lambda case: {} if case.invalid else _expected(case),
    careful=lambda case: None if case.invalid or case.exact else _expected(case, careful=True),
    judge=judge,
    runs=runs,
)
