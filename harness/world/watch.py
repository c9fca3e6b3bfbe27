"""Tells ranks that wait for each other for ever from ranks that work or would like to."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

CAN_WATCH = sys.platform == "linux"

_SAMPLES = 20  # a window; fewer than half of them, because the watcher itself is starved, decide nothing
_FEWEST = 10
# A rank in a deadlock is not perfectly still: every gloo group has a thread that wakes 100 times a second (measured:
# 0.25% of a core), and waiting for a store is polling. A thread is busy above this part of the window.
_BUSY = 0.05
_FEWEST_TICKS = 2
ASLEEP = "SI"  # sleeping, idle; not: running or wanting to (R), waiting for a disk (D), stopped (T), by a debugger (t)
STOPPED = "T"

Sample = dict[int, tuple[bool, int]]  # thread -> (sleeps, ticks of CPU so far)


class Stillness:
    """Watches processes, and all processes that they started, for a window of so many seconds.

    They are still when in the whole window no thread had noticeable time on a CPU, none was found running, waiting
    for a CPU or for a disk in half of the samples, and the progress counter stood. A rank that is starved on a loaded
    machine is therefore not still: it waits for a CPU. asleep: the kernel's letters for threads that wait.
    """

    def __init__(self, window: float, asleep: str = ASLEEP) -> None:
        self.window = window
        self._asleep = asleep
        self.interval = window / _SAMPLES
        self._samples: deque[tuple[float, Sample]] = deque()
        self._key: object = None

    def sample(self, now: float, pids: Iterable[int], progress: object) -> bool:
        """Looks once, at the time ``now`` in seconds; True where they are still.

        progress: anything that compares equal as long as nothing happens. With progress, and where a process or thread
        comes or goes, the window begins anew.
        """
        if not CAN_WATCH:
            return False
        pids = tuple(pids)
        seen = dict(_threads(pids, self._asleep))
        key = pids, progress, seen.keys()  # where one works and then another, neither need be busy for long
        if self._key != key:
            self._key = key
            self._samples.clear()
        self._samples.append((now, seen))
        while self._samples and now - self._samples[0][0] > self.window * 1.5:
            self._samples.popleft()
        return self._full() and not any(map(self._busy, self._samples[-1][1]))

    def _full(self) -> bool:
        span = self._samples[-1][0] - self._samples[0][0]
        return span >= self.window and len(self._samples) >= _FEWEST

    def _busy(self, thread: int) -> bool:
        seen = [(at, sample[thread]) for at, sample in self._samples if thread in sample]
        awake = sum(not sleeps for _, (sleeps, _) in seen)
        ticks = seen[-1][1][1] - seen[0][1][1]
        span = seen[-1][0] - seen[0][0]
        return 2 * awake >= len(self._samples) or ticks > max(_FEWEST_TICKS, _BUSY * span * _TICKS_A_SECOND)


def _threads(pids: Iterable[int], asleep: str) -> Iterator[tuple[int, tuple[bool, int]]]:
    """Every thread of these processes and of their descendants. What ends meanwhile is left out."""
    for pid in pids:
        try:
            tasks = [Path(entry) for entry in os.scandir(f"/proc/{pid}/task")]
        except OSError:
            continue
        for task in tasks:
            try:
                stat = (task / "stat").read_bytes()
                children = (task / "children").read_bytes() if (task / "children").exists() else b""
            except OSError:
                continue
            fields = stat.rpartition(b")")[2].split()  # the name before may hold anything
            yield int(task.name), (fields[0].decode() in asleep, int(fields[11]) + int(fields[12]))
            yield from _threads(map(int, children.split()), asleep)


_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK") if CAN_WATCH else 100
