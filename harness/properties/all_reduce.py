"""All-reduce: reductions equal one process, with the same bits on all ranks, and the bytes of the formula."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import strategies.all_reduce
from harness.candidate import Candidate, NotOffered
from harness.exercise import Names
from harness.find import Spec
from harness.local import Purity, WrongAdapter, WrongResult, local_tensor, permuted, require_like
from harness.module import Sharded
from harness.observation import REFUSED, Observation, Sent
from harness.oracle.patterns.evidence import Suspect
from harness.properties.all_reduce_suspects import suspects
from harness.properties.base import Description, Property, World
from harness.properties.messages import judge_messages, without_messages
from harness.properties.modules import explanation, forms_of, wanted
from harness.properties.refusal import judge_refusal
from harness.properties.tensors import Want, judge_tensors
from harness.properties.traffic import judge_traffic
from harness.session import CandidateRaised, Session, phase
from harness.verdict import Verdict
from harness.wiring import require_known, require_sharded
from harness.world import RankContext
from reference.all_reduce import AllReduceCase, expected, global_shape, layouts, tensors
from reference.all_reduce_traffic import alternatives, needed
from reference.layout import Window, window

_NAMES = Names(parameters=(), inputs=("input",), outputs=("output",))
#: Seconds by which a late rank begins after the others: they are done by then, as far as they can be without it.
_LATE = 0.02


def on_rank(context: RankContext, spec: Spec, case: AllReduceCase) -> Observation:
    """Reduces on this rank, or sees whether it is refused. Inputs and results are overwritten as soon as they are read:
    no other rank may depend on them after the call."""
    candidate = Session.of(context, spec).on(case.mesh)
    if not candidate.offers("all_reduce"):
        raise NotOffered(f"{spec.text} has no all_reduce")
    inputs = _spoilt(case, context.rank, _inputs(case, candidate, context.rank))
    if case.invalid:
        return _attempt(case, candidate, inputs)
    with phase("its declarations"):
        due = tuple(candidate.traffic(case, needed(case)))
    sharded = _built(case, candidate)
    purity = Purity()
    if not case.in_place:
        for m, x in enumerate(inputs):
            purity.watch(f"input[{m}]", x)
    if case.late and _is_last(case, context.rank):
        time.sleep(_LATE)
    before = len(context.traffic.records())
    with phase("forward"):
        returned = sharded.forward(*inputs)
    sent = tuple(Sent("forward", 0, one) for one in context.traffic.records()[before:])
    outputs = inputs if case.in_place else _outputs(case, candidate, context.rank, returned)
    held = {f"output[{m}]": local_tensor(f"output[{m}]", value) for m, value in enumerate(outputs)}
    purity.release()
    effects = (*purity.report(), *_shared(case, inputs, outputs))
    with torch.no_grad():
        for tensor in (*inputs, *outputs):
            tensor.fill_(torch.nan)
    return Observation(held, side_effects=effects, sent=sent, due=due)


def _built(case: AllReduceCase, candidate: Candidate) -> Sharded:
    with phase("build"):
        made = candidate.all_reduce(case)
    sharded = require_sharded(made)
    require_known(_NAMES, sharded)
    if sharded.inputs or sharded.outputs:
        raise WrongAdapter("Sharded(..., inputs=, outputs=): leave it out, tensors are held as the case says")
    return sharded


def _attempt(case: AllReduceCase, candidate: Candidate, inputs: Sequence[torch.Tensor]) -> Observation:
    sharded = _built(case, candidate)
    try:
        with phase("forward"):
            sharded.forward(*inputs)
    except CandidateRaised as error:
        return Observation(facts={REFUSED: str(error).partition("\n")[0]})
    return Observation(facts={REFUSED: None})


def _is_last(case: AllReduceCase, rank: int) -> bool:
    return case.mesh.coordinate(rank, case.axis) == case.parallel_size - 1


def _window(case: AllReduceCase, candidate: Candidate, role: str, shape: tuple[int, ...], rank: int) -> Window:
    return window(global_shape(case, role, shape), layouts(case, candidate.uneven)[role], case.mesh, rank)


def _inputs(case: AllReduceCase, candidate: Candidate, rank: int) -> list[torch.Tensor]:
    """This rank's tensors, contiguous or not."""
    made = []
    for shape, values in zip(case.shapes, tensors(case).values(), strict=True):
        part = _window(case, candidate, "input", shape, rank).take(values).to(case.format.torch_dtype)
        made.append(strided(part) if case.transposed else part.clone(memory_format=torch.contiguous_format))
    return made


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous where there are two or more: every second one of a row, between NaN, or with the
    last dimension outermost in memory."""
    if x.dim() > 1:
        return permuted(x)
    spread = x.new_full((2 * x.numel(),), torch.nan)[::2]
    return spread.copy_(x)


def _spoilt(case: AllReduceCase, rank: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What is handed over in a case that must be refused."""
    if case.invalid == "integers":
        return [x.nan_to_num(0, 0, 0).to(torch.int64) for x in inputs]
    if not _is_last(case, rank):
        return inputs
    first, *rest = inputs
    changed = {
        "length": [first.new_zeros(first.numel() + 1), *rest],
        "dtype": [first.to(torch.float32 if case.dtype == "fp64" else torch.float64), *rest],
        "number": [*inputs, first.new_zeros(1)],
        "order": _in_another_order(inputs),
    }
    return changed.get(case.invalid, inputs)


def _in_another_order(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The first and the first of another length change places."""
    other = next((i for i, x in enumerate(inputs) if x.numel() != inputs[0].numel()), 0)
    changed = list(inputs)
    changed[0], changed[other] = inputs[other], inputs[0]
    return changed


def _outputs(case: AllReduceCase, candidate: Candidate, rank: int, returned: object) -> list[torch.Tensor]:
    several: list[Any] = list(returned) if isinstance(returned, tuple | list) else [returned]
    if len(several) != len(case.shapes):
        raise WrongResult(f"forward returned {len(several)} values; expected {len(case.shapes)}, one a tensor")
    for m, (shape, value) in enumerate(zip(case.shapes, several, strict=True)):
        local = _window(case, candidate, "output", shape, rank).shape
        require_like(f"output[{m}]", value, local, case.format.torch_dtype)
    return several


def _shared(case: AllReduceCase, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[str]:
    """Results in the memory of inputs, where they must not be."""
    if case.in_place or case.parallel_size == 1:
        return []
    return [
        f"returned output[{m}] in the memory of input[{k}]"
        for m, output in enumerate(outputs)
        for k, given in enumerate(inputs)
        if output.numel() and output.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    ]


_WRONG = {
    "length": "tensors that are longer on one rank",
    "dtype": "tensors of another dtype on one rank",
    "order": "tensors in another order on one rank",
    "number": "more tensors on one rank",
    "reduction": "an unknown reduction, 'median':",
    "integers": "the means of whole numbers",
}


def judge(case: AllReduceCase, description: Description, want: dict[str, Want], worlds: Sequence[World]) -> Verdict:
    """Results against one process, replicas against each other, then collectives and messages."""
    seen = worlds[0]
    if case.invalid:
        return judge_refusal(case.mesh, seen, _WRONG[case.invalid])
    given = tensors(case)
    forms = forms_of(want, layouts(case, description.uneven), case.format, (), seen[0])

    def of(name: str) -> list[Suspect]:
        return list(suspects(case, given, name))

    why = explanation(forms, case.mesh, seen, {**given, **expected(case, given)}, 1, of)
    verdict = judge_tensors(want, forms, case.mesh, seen, why)
    collectives = judge_traffic(case.mesh, needed(case), without_messages(seen))
    messages = judge_messages(case.mesh, case.axis, alternatives(case), seen)
    return replace(verdict, findings=(*verdict.findings, *collectives, *messages))


def _expected(case: AllReduceCase, careful: bool = False) -> dict[str, Want]:
    if case.invalid:
        return {}
    given = tensors(case)
    return wanted(case.exact, case.format, lambda: expected(case, given), given, (), careful)


ALL_REDUCE = Property(
    subject="all_reduce",
    case_type=AllReduceCase,
    methods=("all_reduce",),
    features=strategies.all_reduce.FEATURES,
    cases=strategies.all_reduce.cases,
    simpler=strategies.all_reduce.simpler,
    world=lambda case: case.mesh.size,
    on_rank="harness.properties.all_reduce:on_rank",
    expected=_expected,
    careful=lambda case: None if case.exact else _expected(case, careful=True),
    judge=judge,
)
