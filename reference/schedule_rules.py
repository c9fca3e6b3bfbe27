"""The rules of a pipeline schedule, on lists of any origin. They share nothing with what generates lists.

| rule | says |
|---|---|
| known actions | there are no micro-batches and chunks but those of the case |
| forward once, backward once | each (stage, micro-batch): one forward, and one backward or one in two parts |
| order on a rank | a backward after its own forward, the part for the weights after that for the input |
| messages | schedule_messages.py |
| progress | schedule_run.py: with sends that do not wait, every rank comes to its end |
| in flight | not more than the formula (schedule_formulas.py) |
| idle share | as much as the formula, or no more where backwards are split |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from reference.schedule import BI, BW, Array, B, F, Lists, ScheduleCase
from reference.schedule_formulas import EXACT, idle_share, most_in_flight, place_of, span
from reference.schedule_messages import broken_messages
from reference.schedule_run import UNITS, Run, Stuck, Units, run
from reference.schedule_tables import Broken, Tables, more, unknown_actions


@dataclass(frozen=True, eq=False)
class Checked:
    """What was found of lists.

    broken: the rules that they break, gravest first. in_flight: the most of each rank; run: when everything is
    computed, in units of time. Both are None where the lists break a rule that comes before.
    """

    broken: tuple[Broken, ...]
    in_flight: tuple[int, ...] | None = None
    run: Run | None = None


def check(case: ScheduleCase, lists: Lists, units: Units = UNITS) -> Checked:
    """All rules on one rank's worth of lists after the other. Rules that build on broken ones are left out."""
    unknown = tuple(unknown_actions(lists))
    if unknown:
        return Checked(unknown)
    tables = Tables.of(lists)
    broken = (*_forwards(tables), *_backwards(tables))
    if broken:
        return Checked(broken)
    broken = (*_order(tables), *broken_messages(tables))
    if broken:
        return Checked(broken)
    ran = run(tables, units)
    if isinstance(ran, Stuck):
        return Checked((Broken("progress", ran.message, ran.rank, ran.position),))
    held = [_held(actions) for actions in lists.actions]
    broken = (*_too_many(case, lists, held), *_idle(case, ran, units))
    return Checked(broken, tuple(int(of_rank.max(initial=0)) for of_rank in held), ran)


def _forwards(t: Tables) -> Iterator[Broken]:
    yield from _missing(t, "forward once", F, t.count[F] == 0)
    yield from _repeated(t, "forward once", F)


def _backwards(t: Tables) -> Iterator[Broken]:
    whole, to_input, to_weights = (t.count[kind] for kind in (B, BI, BW))
    rule = "backward once"
    yield from _missing(t, rule, B, whole + to_input + to_weights == 0)
    for kind in (B, BI, BW):
        yield from _repeated(t, rule, kind)
    twice = t.worst_first((whole > 0) & (to_input + to_weights > 0))
    for stage, k in twice[:1]:
        rank = int(t.lists.rank_of[stage])
        part = BI if to_input[stage, k] else BW
        at = int(t.first[part, stage, k])
        message = f"rank {rank}, position {at}: {t.name(part, stage, k)} comes beside a whole backward of it"
        yield Broken(rule, f"{message} (position {int(t.first[B, stage, k])}){more(len(twice))}", rank, at)
    yield from _missing(t, rule, BW, (to_input > 0) & (to_weights == 0))
    yield from _missing(t, rule, BI, (to_weights > 0) & (to_input == 0))


def _missing(t: Tables, rule: str, kind: int, wrong: np.ndarray) -> Iterator[Broken]:
    found = t.worst_first(wrong)
    for stage, k in found[:1]:
        rank = int(t.lists.rank_of[stage])
        yield Broken(rule, f"rank {rank}: {t.name(kind, stage, k)} is missing{more(len(found))}", rank)


def _repeated(t: Tables, rule: str, kind: int) -> Iterator[Broken]:
    found = t.worst_first(t.count[kind] > 1, t.first[kind])
    for stage, k in found[:1]:
        rank, again = int(t.lists.rank_of[stage]), t.again(kind, stage, k)
        message = f"rank {rank}, position {again}: {t.name(kind, stage, k)} comes again"
        yield Broken(rule, f"{message} (first at {int(t.first[kind, stage, k])}){more(len(found))}", rank, again)


def _order(t: Tables) -> Iterator[Broken]:
    for kind, after in ((B, F), (BI, F), (BW, BI)):
        wrong = (t.count[kind] > 0) & (t.first[kind] < t.first[after])
        found = t.worst_first(wrong, t.first[kind])
        for stage, k in found[:1]:
            rank, at = int(t.lists.rank_of[stage]), int(t.first[kind, stage, k])
            other = f"{t.name(after, stage, k)} (position {int(t.first[after, stage, k])})"
            message = f"rank {rank}, position {at}: {t.name(kind, stage, k)} comes before {other}{more(len(found))}"
            yield Broken("order on a rank", message, rank, at)


def _held(actions: Array) -> Array:
    """How many activations a rank holds after each of its actions, [actions]."""
    kind = actions[:, 0]
    return np.cumsum((kind == F).astype(int) - (kind == B) - (kind == BW))


def _too_many(case: ScheduleCase, lists: Lists, held: list[Array]) -> Iterator[Broken]:
    for rank, of_rank in enumerate(held):
        most = most_in_flight(case, place_of(case, lists.placement[rank]))
        beyond = np.flatnonzero(of_rank > most) if most is not None else np.empty(0)
        if beyond.size:
            at = int(beyond[0])
            message = (
                f"rank {rank}, position {at}: {int(of_rank[at])} activations are in flight, and {int(of_rank.max())} "
                f"at the peak; {case.kind} holds at most {most} there"
            )
            yield Broken("in flight", message, rank, at)
            return


def _idle(case: ScheduleCase, ran: Run, units: Units) -> Iterator[Broken]:
    expected = span(case, units.forward, units.backward)
    if ran.span == expected or (case.kind not in EXACT and ran.span < expected):
        return
    yield Broken(
        "idle share",
        f"ranks are idle for {say(ran.idle_share)} of the time ({ran.span} units with {units}); expected for "
        f"{case.kind}: {'' if case.kind in EXACT else 'at most '}{say(idle_share(case))} ({expected} units)",
    )


def say(share: Fraction) -> str:
    """``3/11 (27.3 %)``."""
    return f"{share} ({100 * float(share):.1f} %)"
