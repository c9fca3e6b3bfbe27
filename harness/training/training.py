"""The whole training: ranks make some steps while one process makes those before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.bench import Bench
from harness.endings import findings_of, rejection_of
from harness.training import beside, on_ranks
from harness.training.curves import Look, Step, Trained
from harness.training.judging import agreed, judged, side_effects
from harness.training.on_ranks import Part
from harness.training.same_state import look, offered
from harness.verdict import Finding
from harness.world import Outcome, Pool
from reference.train_step import TrainStepCase

#: Steps that ranks make in one go.
_TOGETHER = 5
#: One step of so many is made again from the same state.
_LOOK = 10

Listener = Callable[[Step], object]


class _Over(Exception):
    """Ranks did not return."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


def train(bench: Bench, case: TrainStepCase, listen: Listener = lambda step: None) -> Trained:
    """Trains on ranks and on one process. listen: is told of every step when both have made it."""
    began = time.monotonic()
    training = _Training(case, listen)
    try:
        training.run(bench, bench.ranks(case.mesh))
    except _Over as over:
        refused = rejection_of(over.outcome)
        found = () if refused is not None else findings_of(over.outcome, case.mesh)
        return training.made(bench.spec.text, began, found, refused)
    return training.made(bench.spec.text, began)


def _portions(steps: int) -> Iterator[tuple[list[int], bool]]:
    """The steps of each job, and whether it is one that is looked at."""
    step = 0
    while step < steps:
        whole = step % _LOOK == 0
        count = 1 if whole else min(_TOGETHER, steps - step, _LOOK - step % _LOOK)
        yield list(range(step, step + count)), whole
        step += count


@dataclass
class _Training:
    case: TrainStepCase
    listen: Listener
    steps: list[Step] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    wrong_at: int | None = None
    no_looks: str | None = None

    def __post_init__(self) -> None:
        self.process = beside.Beside(self.case)

    def run(self, bench: Bench, pool: Pool) -> None:
        self._answer(pool.run(on_ranks.begin, bench.spec, self.case))
        before: tuple[list[int], Sequence[Part]] | None = None
        for steps, whole in _portions(self.case.steps):
            pending = pool.start(on_ranks.go_on, steps, whole)
            if before is not None:
                self._follow(*before)  # while the ranks compute
            before = steps, self._answer(pending.result())
        if before is not None:
            self._follow(*before)
        self._answer(pool.run(on_ranks.end))

    def made(self, candidate: str, began: float, found: Sequence[Finding] = (), refused: str | None = None) -> Trained:
        findings = [*self.findings, *found]
        seconds = time.monotonic() - began
        return Trained(
            candidate, self.case.dtype, self.case, self.steps, self.looks, findings, self.wrong_at, refused,
            self.no_looks, seconds,
        )  # fmt: skip

    @staticmethod
    def _answer(outcome: Outcome) -> Sequence[Any]:
        if outcome.kind != "ok":
            raise _Over(outcome)
        return outcome.values()

    def _follow(self, steps: Sequence[int], parts: Sequence[Part]) -> None:
        """One process makes the steps that the ranks have made."""
        seen = [part.seen for part in parts]
        for at, step in enumerate(steps):
            follows = not self.findings
            due = self.process.step(step, agreed(step, at, seen) if follows else None)
            made, wrong = judged(self.case, due, step, at, seen)
            if at == 0:
                wrong += side_effects(self.case, seen)
            before, after = [part.before for part in parts], [part.after for part in parts]
            if follows and not wrong and not due.planned.skipped:
                wrong += self._look(step, due, before, after)
            if wrong and not self.findings:
                self.findings, self.wrong_at = wrong, step
            self.steps.append(made)
            self.listen(made)

    def _look(self, step: int, due: beside.Step, before: Sequence[Any], after: Sequence[Any]) -> list[Finding]:
        if before[0] is None:
            return []
        if not offered(self.case, before):
            self.no_looks = "the candidate does not show masters and state"
            return []
        found, wrong = look(self.case, step, due.planned, before, after)
        self.looks.append(found)
        return wrong
