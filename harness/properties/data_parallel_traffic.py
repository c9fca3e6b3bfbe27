"""Traffic of data parallelism: how often each element that trains is reduced, over which ranks, and in which dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from harness.observation import Sent
from harness.properties.base import World
from harness.properties.traffic import FORMS, orders_differ
from harness.verdict import Finding
from reference.data_parallel import DataParallelCase
from reference.traffic import Transfer

_REDUCTIONS = ("all_reduce", "reduce_scatter")


def judge_reductions(case: DataParallelCase, needed: Sequence[Transfer], observed: World) -> Iterator[Finding]:
    """One finding for each way in which the reductions are not what they should be. Collectives of whole numbers, of
    the forward and of the loss are the candidate's own business, but for their order; and so is in how many pieces
    gradients go. A candidate that declares other transfers may reduce over parts of the group too, in several steps;
    one that declares several for a micro-batch is held to their number and sizes."""
    if any(seen.sent is None for seen in observed):
        return
    order = orders_differ(case.mesh, observed)
    if order is not None:
        yield order
    for rank, seen in enumerate(observed):
        due = seen.due if seen.due is not None else tuple(needed)
        findings = list(_of_rank(case, rank, due, needed, seen.sent or ()))
        if findings:
            yield from findings
            return  # the other ranks do the same


def _of_rank(
    case: DataParallelCase, rank: int, due: Sequence[Transfer], needed: Sequence[Transfer], sent: Sequence[Sent]
) -> Iterator[Finding]:
    place, group = case.mesh.describe(rank), {int(other) for other in case.mesh.group_of(rank, case.axis)}
    reductions, declared = [one for one in sent if _reduces(one)], tuple(due) != tuple(needed)
    for one in reductions:
        over = set(one.collective.group)
        if over != group and not (declared and over < group):
            what = f"{one.collective.describe()}; expected the group {sorted(group)}"
            message = f"{_when(case, one.micro_batch)}: {what}"
            yield Finding("traffic", f"gradients are reduced over another group {message}", rank, place)
            return
    for k in range(case.steps * case.micro_batches):
        found = [one.collective for one in reductions if one.micro_batch == k]
        asked = [one for one in due if one.micro_batch == k and one.operation in _REDUCTIONS]
        wrong = {one.dtype for one in found} - {one.dtype for one in asked}
        if found and asked and wrong:
            formats = ", ".join(sorted(map(str, wrong)))
            message = f"gradients are reduced in {formats} {_when(case, k)}, where {asked[0].dtype} is asked"
            yield Finding("traffic", message, rank, place)
            return
        total, due_total = sum(one.elements for one in found), sum(one.elements for one in asked)
        # A reduce-scatter gives every rank as much: what it is given may be padded for that.
        padding = sum(len(one.group) - 1 for one in found if FORMS.get(one.operation) == "reduce_scatter")
        most = due_total + (0 if declared else padding)
        if not sum(one.least if one.least is not None else one.elements for one in asked) <= total <= most:
            yield Finding("traffic", _amount(case, k, total, due_total), rank, place, details=_listed(found))
            return
        if len(asked) > 1 and Counter(one.elements for one in found) != Counter(one.elements for one in asked):
            message = f"gradients are reduced {_when(case, k)} in {len(found)} pieces of other sizes than declared"
            yield Finding("traffic", message, rank, place, details=_listed(found))
            return


def _reduces(one: Sent) -> bool:
    """Whether it is a reduction of gradients: of floating-point numbers, in backward or after it."""
    what = one.collective
    operation = FORMS.get(what.operation, what.operation)
    floating = what.dtype is not None and "float" in what.dtype
    return one.phase != "forward" and operation in _REDUCTIONS and floating and len(what.group) > 1


def _amount(case: DataParallelCase, k: int, found: int, due: int) -> str:
    if found > due:
        more = "nothing is due" if not due else f"{due} are due"
        return f"more traffic than needed: {found} elements of gradients are reduced {_when(case, k)}, where {more}"
    return f"no traffic where some is needed: {found} elements of gradients are reduced {_when(case, k)}, of {due}"


def _when(case: DataParallelCase, k: int) -> str:
    step, m = divmod(k, case.micro_batches)
    return f"in step {step}, micro-batch {m}"


def _listed(found: Sequence[object]) -> str:
    lines = [f"  {one.describe()}" for one in found]  # type: ignore[attr-defined]
    return "\n".join(["reductions:", *lines]) if lines else "reductions: none"
