"""Traffic: the collectives of every rank are those that the algebra needs, in the dtype asked, in one order.

Values may be right although a gradient is reduced twice over, in another dtype, or by moving more than needed; only
what went over the wire shows that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from harness.observation import Sent
from harness.properties.base import World
from harness.verdict import Finding
from harness.world.traffic import Collective
from reference.mesh import Mesh
from reference.traffic import Transfer

#: torch.distributed has several forms of one collective.
FORMS = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_reduce_coalesced": "all_reduce",
}


def judge_traffic(mesh: Mesh, needed: Sequence[Transfer], observed: World) -> Iterator[Finding]:
    """One finding for each way in which the traffic is not what it should be; needed: unless a candidate declares what
    it does instead, or holds inputs or outputs in another way; then only the order is compared.
    Nothing is said where traffic was not recorded."""
    if any(seen.sent is None for seen in observed):
        return
    order = orders_differ(mesh, observed)
    if order is not None:
        yield order
    for rank, seen in enumerate(observed):
        due = seen.due if seen.due is not None else needed
        if seen.departs and tuple(due) == tuple(needed):
            continue  # what is needed then, the candidate alone can say, and has not
        # In a group of one rank nothing moves.
        findings = list(_of_rank(mesh, rank, due, [one for one in seen.sent or () if len(one.collective.group) > 1]))
        if findings:
            yield from findings
            return  # the other ranks do the same


def _of_rank(mesh: Mesh, rank: int, due: Sequence[Transfer], sent: Sequence[Sent]) -> Iterator[Finding]:
    missing, surplus = list(due), []
    for one in sent:
        fitting = [d for d in missing if _is(d, one, mesh, rank) and d.dtype == one.collective.dtype]
        match = min(fitting, key=lambda d: d.elements, default=None)
        if match is None:
            surplus.append(one)
        else:
            missing.remove(match)
    place = mesh.describe(rank)
    for one in list(surplus):
        other = next((d for d in missing if _is(d, one, mesh, rank)), None)
        if other is not None:
            missing.remove(other)
            surplus.remove(one)
            message = f"{_when(one)}: {_what(one.collective)}, where {other.dtype} is due"
            yield Finding("traffic", f"another dtype than asked in the {message}", rank, place)
    if surplus:
        lines = "; ".join(f"{_when(one)}: {_what(one.collective)}" for one in surplus[:3])
        more = f" and {len(surplus) - 3} more" if len(surplus) > 3 else ""
        yield Finding("traffic", f"more traffic than needed in the {lines}{more}", rank, place, details=_due(due))
    needed = [one for one in missing if not one.optional]
    if needed:
        lines = "; ".join(_line(one) for one in needed[:3])
        yield Finding("traffic", f"no traffic where some is needed: {lines}", rank, place, details=_seen(sent))


def _is(due: Transfer, one: Sent, mesh: Mesh, rank: int) -> bool:
    """Whether it is this collective, in any dtype; pieces of an uneven cut may travel padded or not."""
    what = one.collective
    same = due.phase == one.phase and due.micro_batch == one.micro_batch
    group = tuple(sorted(mesh.group_of(rank, due.axis)))
    return (
        same
        and due.operation == FORMS.get(what.operation, what.operation)
        and group == tuple(sorted(what.group))
        and due.fits(what.elements)
    )


def orders_differ(mesh: Mesh, observed: World) -> Finding | None:
    """Two ranks that meet in the collectives of their groups in another order: where these do not block at once, they
    cross-talk or hang. What threads of their own begin is in order where it is in each group."""
    for a, b in itertools.combinations(range(len(observed)), 2):
        ours = [one for one in observed[a].sent or () if b in one.collective.group]
        theirs = [one for one in observed[b].sent or () if a in one.collective.group]
        if any(one.collective.aside for one in ours + theirs):
            ours, theirs = sorted(ours, key=_group), sorted(theirs, key=_group)
        for x, y in itertools.zip_longest(ours, theirs):
            if x is None or y is None or _key(x) != _key(y):
                texts = ["nothing" if one is None else f"{_what(one.collective)} in the {_when(one)}" for one in (x, y)]
                message = f"ranks {a} and {b} do not take part in the same collectives: {texts[0]}, and {texts[1]}"
                return Finding("traffic", message, a, mesh.describe(a))
    return None


def _group(one: Sent) -> tuple[int, ...]:
    return tuple(sorted(one.collective.group))


def _key(one: Sent) -> tuple[object, ...]:
    return one.collective.operation, _group(one), one.collective.dtype


def _when(one: Sent) -> str:
    return "finish" if one.phase == "finish" else f"{one.phase} of micro-batch {one.micro_batch}"


def _what(one: Collective) -> str:
    return one.describe()


def _line(one: Transfer) -> str:
    when = "finish" if one.phase == "finish" else f"{one.phase} of micro-batch {one.micro_batch}"
    return f"{when}: {one.operation} over {one.axis}, {one.dtype}, {one.elements} elements"


def _due(due: Sequence[Transfer]) -> str:
    return "\n".join(["needed:", *(f"  {_line(one)}" for one in due)]) if due else "needed: nothing"


def _seen(sent: Sequence[Sent]) -> str:
    lines = [f"  {_when(one)}: {_what(one.collective)}" for one in sent]
    return "\n".join(["sent:", *lines]) if lines else "sent: nothing"
