"""Waits for ranks to start, and says what they were waited for when they do not."""

from __future__ import annotations

import time
from collections.abc import Iterable

from harness.world.crew import Crew
from harness.world.forkserver import Suspect
from harness.world.outcome import Raised
from harness.world.preloading import OURS
from harness.world.watch import ASLEEP, STOPPED, Stillness


class WorldError(RuntimeError):
    """Ranks could not be started: a fault of the machine or of ours, and never of the function that was to run."""


def wait_until_ready(crew: Crew, patience: float, suspect: Suspect | None = None, quiet: float = 0.0) -> None:
    """Waits until every rank has its group. Raises WorldError where that does not happen within so many seconds.

    suspect: a rank server that may hang: where it sleeps for ``quiet`` seconds and has forked none of these ranks, it
    does, and they are waited for no longer.
    """
    if crew.ready_at is not None:
        return
    end = time.monotonic() + patience
    waiting = set(range(crew.world_size))
    # Other ranks that it has forked may be there, and idle ones are stopped.
    stillness = Stillness(quiet, ASLEEP + STOPPED) if suspect is not None else None
    while True:
        for rank in sorted(waiting):
            match crew.take(rank):
                case ("ready", _):
                    waiting.remove(rank)
                case (_, Raised() as why):
                    raise WorldError(f"{_name(crew, rank)} could not start: {why.message}\n{why.traceback}")
                case None if rank in crew.codes:
                    raise WorldError(f"{_name(crew, rank)} could not start: {crew.how_ended(rank)}")
        # The server's word of a rank may come after the rank's own.
        if not waiting and len(crew.pids) == crew.world_size:
            break
        now = time.monotonic()
        if now > end:
            raise WorldError(f"ranks {sorted(waiting)} did not start within {patience:.0f} s: {_why(crew, waiting)}")
        look_at = end
        if suspect is not None and stillness is not None and not crew.pids:
            look_at = now + stillness.interval
            if stillness.sample(now, [suspect.pid], progress=None):
                raise WorldError(f"the rank server hangs while it imports {', '.join(suspect.modules)}")
        crew.pump(max(0.0, min(look_at, end) - now))
    crew.ready_at = time.monotonic()


def _name(crew: Crew, rank: int) -> str:
    return f"rank {rank} of {crew.world_size}"


def _why(crew: Crew, waiting: Iterable[int]) -> str:
    forked = [rank for rank in waiting if rank in crew.pids]
    if not forked:
        return f"the rank server has not forked them, for which it imports {', '.join(OURS)}"
    stacks = crew.stacks(forked)
    return "they have not opened their group\n" + "\n".join(f"{_name(crew, rank)}:\n{stacks[rank]}" for rank in forked)
