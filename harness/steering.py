"""Steers a search: cases near those whose statistics were the largest.

Hypothesis has ``Phase.target`` for this, but leaves it out where a backend of one's own draws. Where the backend hands
the last fifth of 100 examples over to it, its optimiser raises one choice of 40 after another, the last first, and does
not get past the seeds of the data: in a simulation it raised no fault above the limit more often than independent
draws. So a neighbour is made here: it keeps the choices of one of the worst cases but for one or a few, which are drawn
afresh.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from random import Random
from typing import Any, TypeVar

import hypothesis
from hypothesis.internal.conjecture.choice import ChoiceNode

from harness.verdict import Verdict

T = TypeVar("T")

#: The facts of a verdict that are worth raising; both have the same limit.
_STATISTICS = ("worst", "slope")

#: So many of the worst cases are remembered for each statistic, and each is chosen half as often as the one before it.
_REMEMBERED = 4

#: An option of the parent may have put this many choices more or fewer before the next one that is kept.
_MOST_SKIPPED = 12

#: A choice that is drawn so often and still comes out as before can hardly come out otherwise.
_MOST_TRIES = 20


def aim(verdict: Verdict) -> None:
    """Tells Hypothesis the statistics of a case in whose test it is called; an infinity or NaN is nothing to climb."""
    if not hypothesis.currently_in_test_context():
        return
    for name in _STATISTICS:
        value = verdict.facts.get(name)
        if value is not None and math.isfinite(value):
            hypothesis.target(value, label=name)


class Plan:
    """The choices of a case that is drawn like another one: those of ``parent``, but for those at ``afresh``."""

    def __init__(self, parent: Sequence[ChoiceNode], afresh: set[int]) -> None:
        self._parent = parent
        self._afresh = afresh
        self._at = 0

    def draw(self, kind: str, constraints: Mapping[str, Any], fresh: Callable[[], T]) -> T:
        """The parent's next choice of that kind and range. A choice that it has not is drawn; what it has in excess,
        because the case now takes other options, is skipped."""
        for at in range(self._at, min(len(self._parent), self._at + _MOST_SKIPPED)):
            node = self._parent[at]
            if node.type == kind and node.constraints == constraints:
                self._at = at + 1
                return _other(node.value, fresh) if at in self._afresh else node.value  # type: ignore[return-value]
        return fresh()


def _other(than: object, fresh: Callable[[], T]) -> T:
    """One more run of the same case would teach nothing."""
    value = fresh()
    for _ in range(_MOST_TRIES):
        if value != than:
            break
        value = fresh()
    return value


class Steering:
    """Remembers the worst cases, and plans neighbours of them once ``due`` says so."""

    def __init__(self, due: Callable[[], bool]) -> None:
        self._due = due
        self._worst: dict[str, list[tuple[float, Sequence[ChoiceNode]]]] = {}
        self._turn = 0

    def learn(self, choices: Sequence[ChoiceNode], scores: Mapping[str, float]) -> None:
        """Takes note of a case that held. One in which nothing rounded has no score, or 0, and no neighbours."""
        drawn = [node for node in choices if not node.was_forced]
        for name, score in scores.items():
            best = self._worst.setdefault(name, [])
            if score > 0 and not any(_same(drawn, known) for _, known in best):
                best.append((score, drawn))
                best.sort(key=lambda pair: -pair[0])  # which keeps the earlier of two that are equal first
                del best[_REMEMBERED:]

    def neighbour(self, random: Random) -> Plan | None:
        """How to draw the next case; None where it is to be drawn independently of all others."""
        names = sorted(name for name, best in self._worst.items() if best)
        if not names or not self._due():
            return None
        best = self._worst[names[self._turn % len(names)]]
        self._turn += 1
        _, parent = best[min(_halves(random), len(best) - 1)]
        free = [at for at, node in enumerate(parent) if _has_others(node)]
        return Plan(parent, set(random.sample(free, min(1 + _halves(random), len(free)))))


def _same(one: Sequence[ChoiceNode], other: Sequence[ChoiceNode]) -> bool:
    return [node.value for node in one] == [node.value for node in other]


def _halves(random: Random) -> int:
    """0 half of the time, 1 a quarter of it, and so on."""
    n = 0
    while random.random() < 0.5:
        n += 1
    return n


def _has_others(node: ChoiceNode) -> bool:
    """Whether a choice could have come out otherwise."""
    constraints: Mapping[str, Any] = node.constraints
    if node.type == "integer":
        return bool(constraints["min_value"] is None or constraints["min_value"] != constraints["max_value"])
    return node.type == "boolean" and 0 < constraints["p"] < 1


#: What steers the backend's draws, where something does.
_CURRENT: ContextVar[Steering | None] = ContextVar("steering", default=None)


def current() -> Steering | None:
    return _CURRENT.get()


@contextlib.contextmanager
def steered(by: Steering) -> Iterator[None]:
    """Tests with the backend ``shardproof`` that run in it are steered."""
    token = _CURRENT.set(by)
    try:
        yield
    finally:
        _CURRENT.reset(token)
