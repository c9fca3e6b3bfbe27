"""Runs functions on a world of ranks, one job at a time, and says how each job ended."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from harness.world import functions, wire
from harness.world.context import imports_for_ranks, this_rank
from harness.world.crew import Crew
from harness.world.forkserver import FORKSERVER, search_path
from harness.world.outcome import Outcome
from harness.world.starting import WorldError, wait_until_ready
from harness.world.waiting import Job, wait

# From request to ready ranks: a cold import of torch from a slow disk, and of what the user preloads.
START_TIMEOUT = 180.0
# A server that sleeps so long while it imports the user's modules hangs: longer than for ranks, as files may be far
# away. The ranks import them anew, so that a wrong guess costs seconds, and a right one ends in an outcome with stacks.
QUIET_IMPORT = 5.0

_numbers = itertools.count()


class Pending:
    """A job that was started."""

    def __init__(self, pool: Pool, job: Job) -> None:
        self.job = job
        self._pool = pool
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
            self._outcome, reusable = wait(self._pool.ready_crew(), self.job, self._pool.quiet)
        finally:
            # Interrupted from the keyboard, say: the ranks still run the job.
            if self._outcome is None:
                self._pool.discard()
            else:
                self._pool.settle(self, reusable=reusable)
        return self._outcome


class Pool:
    """A world of ``world_size`` processes with an initialised gloo group, kept from job to job.

    deadline: seconds that one job may take on ready ranks. quiet: seconds after which ranks that all sleep are given up
    as a hang (Linux; elsewhere the deadline decides). preload: modules to import once, before ranks are forked; one
    that fails to import fails again on the rank, where a job reports it.

    A job that is not ok ends its processes, and the next one gets fresh ones. Processes start in the background as
    soon as the pool is made. Raises RuntimeError on a rank, ValueError for a nonsensical size or time.
    """

    def __init__(
        self, world_size: int, *, deadline: float = 30.0, quiet: float = 2.0, preload: Sequence[str] = ()
    ) -> None:
        if this_rank() is not None:
            raise RuntimeError(
                f"rank {this_rank()} asked for a Pool: what runs on a rank cannot start ranks itself. Ranks import the "
                "candidate's module: a test that draws cases belongs into another one"
            )
        if imports_for_ranks():
            raise RuntimeError("a module that is imported for ranks asked for a Pool: it cannot start ranks itself")
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}: expected at least 1")
        for name, seconds in (("deadline", deadline), ("quiet", quiet)):
            if not seconds > 0:
                raise ValueError(f"{name} is {seconds}: expected seconds above 0")
        self.world_size = world_size
        self.deadline = deadline
        self.quiet = quiet
        self._preload = tuple(preload)
        self._history: list[str] = []
        self._pending: Pending | None = None
        self._closed = False
        self._crew: Crew | None = None
        self._present_crew()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the present ranks, in the order of ranks; waits until they have started."""
        crew = self.ready_crew()
        return tuple(crew.pids[rank] for rank in range(self.world_size))

    def start(
        self,
        function: Callable[..., Any] | str,
        *args: Any,
        label: str = "",
        deadline: float | None = None,
        delays: int = 0,
    ) -> Pending:
        """Starts ``function(rank_context, *args)`` on every rank and returns at once.

        function: one that ranks can import, or ``module:name`` or ``path/to/file.py:name``. label: how the histories
        of later outcomes name this job (default: the function's name). deadline: for this job, in seconds. delays: the
        seed of `harness.world.delays.Delays`. A job before it that was not asked for its result is abandoned, and its
        processes with it.

        Raises ValueError for a function that ranks cannot import, and what pickling the arguments raises.
        """
        packed, number = functions.pack(function), next(_numbers)
        job = {"number": number, "function": packed, "args": wire.dump(args), "path": search_path(), "delays": delays}
        payload = wire.dump(job)
        if self._pending is not None:
            self.discard()
        crew = self._present_crew()
        crew.resume()
        crew.pump(0)
        if crew.gone:  # the server died while the ranks were idle, which is no fault of this job
            self.discard()
            crew = self._present_crew()
        deadline = self.deadline if deadline is None else deadline
        pending = Pending(self, Job(number, payload, time.monotonic(), deadline, tuple(self._history)))
        self._history.append(label or functions.describe(function))
        self._pending = pending
        crew.send(payload, START_TIMEOUT)
        return pending

    def run(
        self, function: Callable[..., Any] | str, *args: Any, label: str = "", deadline: float | None = None
    ) -> Outcome:
        """``start(...).result()``."""
        return self.start(function, *args, label=label, deadline=deadline).result()

    def restart(self) -> None:
        """Kills the ranks; the next job gets fresh ones, which start in the background. A job that runs is lost."""
        self.discard()
        self._present_crew()

    def close(self) -> None:
        """Kills the ranks and returns when they are gone. Does nothing the second time."""
        self._closed = True
        self.discard()

    def settle(self, pending: Pending, *, reusable: bool) -> None:
        """Called by a job at its end, with whether its processes are fit for another one."""
        if self._pending is pending:
            self._pending = None
            if not reusable:
                self.restart()
            elif self._crew is not None:
                self._crew.pause()

    def ready_crew(self) -> Crew:
        """The present ranks, waited for. Raises WorldError, after a second try without the user's preloads."""
        crew = self._present_crew()
        try:
            wait_until_ready(crew, START_TIMEOUT, FORKSERVER.suspect(), max(self.quiet, QUIET_IMPORT))
        except WorldError:
            if len(crew.pids) == self.world_size:
                raise  # they were forked, so that it is not the server that is sick
            FORKSERVER.distrust()
            crew.kill()
            crew = self._crew = Crew(self.world_size)
            if self._pending is not None:
                crew.send(self._pending.job.payload, START_TIMEOUT)
            wait_until_ready(crew, START_TIMEOUT)
        return crew

    def _present_crew(self) -> Crew:
        if self._closed:
            raise RuntimeError("this pool is closed")
        if self._crew is None:
            FORKSERVER.preload(self._preload)
            self._crew = Crew(self.world_size)
        return self._crew

    def discard(self) -> None:
        """Kills the ranks; fresh ones start when they are needed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.abandon()
        self._history = []
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.kill()
