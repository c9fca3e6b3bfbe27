"""A sharded optimizer: parameters and state of n ranks equal one process that steps with the reduced gradient, replicas
hold the same bits, every element of the state has one owner, and a saved state goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import strategies.sharded_optimizer
from harness.candidate import NotOffered
from harness.find import Spec
from harness.observation import Observation
from harness.optimize import attempt, optimize
from harness.properties.base import Description, Property, World
from harness.properties.modules import explanation, wanted
from harness.properties.ownership import judge_ownership, with_joined_state
from harness.properties.refusal import half_loaded, judge_refusal
from harness.properties.resumed import judge_resumed
from harness.properties.sharded_optimizer_suspects import suspects
from harness.properties.tensors import Form, Want, judge_tensors
from harness.properties.traffic import judge_traffic
from harness.session import Session, phase
from harness.verdict import Verdict
from harness.world import RankContext
from reference.layout import Each
from reference.sharded_optimizer import ShardedOptimizerCase, expected, tensors
from reference.sharded_optimizer_traffic import needed


def on_rank(context: RankContext, spec: Spec, case: ShardedOptimizerCase, before: World | None = None) -> Observation:
    """Makes the steps on this rank, or sees whether what is wrong is refused. before: what the processes saw that it
    takes over from."""
    candidate = Session.of(context, spec).on(case.mesh)
    if not candidate.offers("sharded_optimizer"):
        raise NotOffered(f"{spec.text} has no sharded_optimizer")
    given = tensors(case)
    if case.invalid:
        return attempt(case, given, context.rank, candidate.sharded_optimizer)
    with phase("its declarations"):
        due = tuple(candidate.traffic(case, needed(case)))
    own = None if before is None else before[context.rank]
    seen = optimize(case, given, context.rank, candidate.sharded_optimizer, context.traffic, own)
    return replace(seen, due=due)


def runs(case: ShardedOptimizerCase, description: Description) -> Sequence[ShardedOptimizerCase]:
    """Where a state is loaded at the same size, also without an interruption."""
    again = case.load and not case.load_axis and not case.invalid
    return (case, replace(case, load=0, relaunch=False)) if again else (case,)


_WRONG = {
    "number": "parameters that differ in number on the last rank",
    "shape": "parameters that differ in shape on the last rank",
    "dtype": "parameters that differ in dtype on the last rank",
    "order": "parameters that differ in order on the last rank",
    "empty": "empty lists of parameters",
    "state_number": "states with a parameter more than there are",
    "state_shape": "states with a parameter of another shape",
    "state_optimizer": "states of another optimizer",
}


def judge(
    case: ShardedOptimizerCase, description: Description, want: dict[str, Want], worlds: Sequence[World]
) -> Verdict:
    """Ownership, then parameters and state against one process, replicas against each other, the run without an
    interruption, and the traffic."""
    seen = worlds[0]
    if case.invalid:
        refusal = judge_refusal(case.mesh, seen, _WRONG[case.invalid])
        return replace(refusal, findings=(*refusal.findings, *half_loaded(case.mesh, seen)))
    given = tensors(case)
    ownership = list(judge_ownership(case, seen))
    if not ownership:
        seen = with_joined_state(case, seen)
    reported = {name for one in seen for name in one.tensors} if not ownership else set()
    want = {name: one for name, one in want.items() if name.startswith("parameter") or name in reported}
    forms = forms_of(case, want)
    why = explanation(forms, case.mesh, seen, expected(case, given), 1, lambda name: suspects(case, given, name))
    verdict = judge_tensors(want, forms, case.mesh, seen, why)
    # What saving and loading did explains the rest.
    findings = (
        *judge_resumed(case.mesh, case.load, worlds, [*verdict.findings, *ownership], case.relaunch),
        *verdict.findings,
        *ownership,
        *judge_traffic(case.mesh, needed(case), seen),
    )
    return replace(verdict, findings=findings)


def forms_of(case: ShardedOptimizerCase, names: dict[str, Want]) -> dict[str, Form]:
    """Every replica has its own, of which all its ranks hold the whole."""
    forms = {}
    for name in names:
        kind, i = split(name)
        fmt = case.format_of(i) if kind == "parameter" else case.kept(i)
        forms[name] = Form((Each(case.apart),), str(fmt.torch_dtype).removeprefix("torch."))
    return forms


def split(name: str) -> tuple[str, int]:
    """``exp_avg3[0]`` as ("exp_avg", 3)."""
    base = name.partition("[")[0]
    kind = base.rstrip("0123456789")
    return kind, int(base[len(kind) :])


def _expected(case: ShardedOptimizerCase, careful: bool = False) -> dict[str, Want]:
    given = tensors(case)
    return wanted(case.exact, case.format, lambda: expected(case, given), given, (), careful)


SHARDED_OPTIMIZER = Property(
    subject="sharded_optimizer",
    case_type=ShardedOptimizerCase,
    methods=("sharded_optimizer",),
    features=strategies.sharded_optimizer.FEATURES,
    cases=strategies.sharded_optimizer.cases,
    simpler=strategies.sharded_optimizer.simpler,
    world=lambda case: case.mesh.size,
    on_rank="harness.properties.sharded_optimizer:on_rank",
    expected=lambda case: {} if case.invalid else _expected(case),
    careful=lambda case: None if case.invalid or case.exact else _expected(case, careful=True),
    judge=judge,
    runs=runs,
    carried_on=lambda case, world: world if case.relaunch and not case.invalid else None,
)
