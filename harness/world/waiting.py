"""Waits for a job's ranks, and decides when there is nothing more to wait for."""

from __future__ import annotations

import time
from dataclasses import dataclass

from harness.world import wire
from harness.world.crew import Crew
from harness.world.outcome import Blocked, Died, Ending, Outcome, Raised
from harness.world.watch import Stillness

# Where a rank has raised or died, the others mostly wait for it for ever: they get this long to say more.
QUIET_AFTER_TROUBLE = 0.5
GRACE_AFTER_TROUBLE = 5.0
# A job that is quickly done is not looked at, since looking costs more than it.
_UNWATCHED = 0.2


@dataclass(frozen=True)
class Job:
    """A job that was started.

    number: in every answer to it. payload: the message for the ranks. sent: when, by the monotonic clock. history: the
    labels of the jobs before it in the same processes.
    """

    number: int
    payload: bytes
    sent: float
    deadline: float
    history: tuple[str, ...]


def wait(crew: Crew, job: Job, quiet: float) -> tuple[Outcome, bool]:
    """How the job ended on this crew, which is ready, and whether its processes are fit for another one."""
    assert crew.ready_at is not None
    answers = _Answers(crew, job.number)
    began = max(job.sent, crew.ready_at)
    asked = time.monotonic()
    end = max(began + job.deadline, asked + min(quiet, job.deadline))
    stillness = Stillness(quiet)
    look_at = asked + _UNWATCHED
    in_trouble = False
    while waiting := answers.missing():
        now = time.monotonic()
        if answers.trouble and not in_trouble:
            in_trouble = True
            end = min(end, now + GRACE_AFTER_TROUBLE)
            stillness = Stillness(min(quiet, QUIET_AFTER_TROUBLE))
            look_at = now
        if now >= end:
            break
        if now >= look_at:
            look_at = now + stillness.interval
            if stillness.sample(now, crew.living(waiting), crew.progress(waiting)):
                break
        crew.pump(max(0.0, min(look_at, end) - now))
    given_up = bool(waiting)
    if given_up:
        _give_up(crew, answers)
    told = tuple(crew.slots.told(rank) for rank in range(crew.world_size))
    outcome = Outcome(answers.in_order(), time.monotonic() - began, job.history, told)
    if outcome.kind == "ok":
        outcome = Outcome(outcome.ranks, max(answers.seconds), job.history)
    return outcome, outcome.kind == "ok" and not given_up and not answers.spoiled


def _give_up(crew: Crew, answers: _Answers) -> None:
    stacks = crew.stacks(answers.missing())
    crew.pump(0)
    for rank in answers.missing():  # some may have finished in this very moment
        answers.endings[rank] = Blocked(stacks[rank], crew.slots.read(rank))


class _Answers:
    """What the ranks have said to this job so far. spoiled: their processes are not fit for another job."""

    def __init__(self, crew: Crew, job: int) -> None:
        self.endings: dict[int, Ending] = {}
        self.seconds: list[float] = []
        self.spoiled = False
        self.trouble = False
        self._crew = crew
        self._job = job

    def missing(self) -> list[int]:
        """The ranks that have not ended, after taking in what has arrived."""
        for rank in range(self._crew.world_size):
            if rank not in self.endings:
                self._ask(rank)
        return [rank for rank in range(self._crew.world_size) if rank not in self.endings]

    def in_order(self) -> tuple[Ending, ...]:
        return tuple(self.endings[rank] for rank in range(self._crew.world_size))

    def _ask(self, rank: int) -> None:
        message = self._crew.take(rank)
        while message is not None and message[1][0] != self._job:
            message = self._crew.take(rank)  # whoever said that, it is no answer to what was asked
        if message is not None:
            _, answer, seconds, spoiled = message[1]
            self.endings[rank] = _read(answer, rank)
            self.seconds.append(seconds)
            self.spoiled |= spoiled
        elif rank in self._crew.codes:
            last = self._crew.slots.read(rank)
            self.endings[rank] = Died(self._crew.codes[rank], self._crew.how_ended(rank), last)
        self.trouble |= isinstance(self.endings.get(rank), Raised | Died)


def _read(answer: bytes, rank: int) -> Ending:
    try:
        ending: Ending = wire.load(answer)
    except Exception as error:  # what a pickle raises is anything
        message = f"the result of rank {rank} cannot be read back: {type(error).__name__}: {error}"
        return Raised(type(error).__qualname__, message, "")
    return ending
