"""A job that runs: waits for its ranks, and decides when there is nothing more to wait for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from harness.world import wire
from harness.world.crew import Crew
from harness.world.outcome import Blocked, Died, Ending, Outcome, Raised
from harness.world.watch import Stillness

if TYPE_CHECKING:
    from harness.world.pool import Pool

# Where a rank has raised or died, the others mostly wait for it for ever: they get this long to say more.
QUIET_AFTER_TROUBLE = 0.5
GRACE_AFTER_TROUBLE = 5.0
# A job that is quickly done is not looked at, since looking costs more than it.
_UNWATCHED = 0.2


class Pending:
    """A job that was started. job: the message for the ranks."""

    def __init__(self, pool: Pool, job: bytes, history: tuple[str, ...], deadline: float) -> None:
        self.job = job
        self._pool = pool
        self._history = history
        self._deadline = deadline
        self._sent = time.monotonic()
        self._outcome: Outcome | None = None
        self._abandoned = False

    def abandon(self) -> None:
        """Its processes are killed: it will have no result."""
        self._abandoned = self._outcome is None

    def result(self) -> Outcome:
        """How the job ended, waited for; the same again when asked again.

        The deadline counts from the start, and no rank is given up before ``quiet`` seconds of waiting here: what
        arrived while the caller did something else is read first.

        Raises RuntimeError for an abandoned job, WorldError where the ranks could not be started.
        """
        if self._outcome is not None:
            return self._outcome
        if self._abandoned:
            raise RuntimeError("this job was abandoned: its pool was closed, restarted, or given another job")
        reusable = False
        try:
            self._outcome, reusable = self._wait()
        finally:
            # Interrupted from the keyboard, say: the ranks still run the job.
            if self._outcome is None:
                self._pool.discard()
            else:
                self._pool.settle(self, reusable=reusable)
        return self._outcome

    def _wait(self) -> tuple[Outcome, bool]:
        crew = self._pool.ready_crew()
        assert crew.ready_at is not None
        answers = _Answers(crew)
        began = max(self._sent, crew.ready_at)
        asked = time.monotonic()
        end = max(began + self._deadline, asked + min(self._pool.quiet, self._deadline))
        stillness = Stillness(self._pool.quiet)
        look_at = asked + _UNWATCHED
        in_trouble = False
        while waiting := answers.missing():
            now = time.monotonic()
            if answers.trouble and not in_trouble:
                in_trouble = True
                end = min(end, now + GRACE_AFTER_TROUBLE)
                stillness = Stillness(min(self._pool.quiet, QUIET_AFTER_TROUBLE))
                look_at = now
            if now >= end:
                break
            if now >= look_at:
                look_at = now + stillness.interval
                begun = [crew.slots.count(rank) for rank in waiting]
                if stillness.sample(now, crew.living(waiting), begun):
                    break
            crew.pump(max(0.0, min(look_at, end) - now))
        given_up = bool(waiting)
        if given_up:
            self._give_up(crew, answers)
        outcome = Outcome(answers.in_order(), time.monotonic() - began, self._history)
        if outcome.kind == "ok":
            outcome = Outcome(outcome.ranks, max(answers.seconds), self._history)
        return outcome, outcome.kind == "ok" and not given_up and not answers.spoiled

    @staticmethod
    def _give_up(crew: Crew, answers: _Answers) -> None:
        stacks = crew.stacks(answers.missing())
        crew.pump(0)
        for rank in answers.missing():  # some may have finished in this very moment
            answers.endings[rank] = Blocked(stacks[rank], crew.slots.read(rank))


class _Answers:
    """What the ranks have said so far. spoiled: their processes are not fit for another job."""

    def __init__(self, crew: Crew) -> None:
        self.endings: dict[int, Ending] = {}
        self.seconds: list[float] = []
        self.spoiled = False
        self.trouble = False
        self._crew = crew

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
        if message is not None:
            answer, seconds, spoiled = message[1]
            self.endings[rank] = _read(answer, rank)
            self.seconds.append(seconds)
            self.spoiled |= spoiled
        elif rank in self._crew.codes:
            self.endings[rank] = Died(self._crew.codes[rank], self._crew.how_ended(rank))
        self.trouble |= isinstance(self.endings.get(rank), Raised | Died)


def _read(answer: bytes, rank: int) -> Ending:
    try:
        ending: Ending = wire.load(answer)
    except Exception as error:  # what a pickle raises is anything
        message = f"the result of rank {rank} cannot be read back: {type(error).__name__}: {error}"
        return Raised(type(error).__qualname__, message, "")
    return ending
