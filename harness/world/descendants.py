"""Keeps hold of the processes that ranks start, whatever session or group they go to.

On Linux a process may ask to become the parent of every orphan among its descendants. Elsewhere none of this does
anything: what a rank has started is killed there only as long as it stays in the rank's process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SELF = Path("/proc/self/task")


def die_with_parent(signal_number: int) -> None:
    """Asks the kernel for this signal at the parent's death; 0: no more."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def adopt_orphans() -> None:
    """From now on the descendants of this process become its children when their parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> set[int]:
    """The pids of this process's children, those included that have ended and are not waited for yet."""
    return set(_listed() if _LISTS_CHILDREN else _searched())


def kill_children(spared: Callable[[int], bool] = lambda pid: False, patience: float = 5.0) -> None:
    """Kills and reaps this process's children, those not that are spared, and what becomes its child thereby.

    Gives up after so many seconds, on processes that the kernel cannot end or that start new ones faster.
    """
    end = time.monotonic() + patience
    while (doomed := [pid for pid in children() if not spared(pid)]) and time.monotonic() < end:
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so that the pid is still theirs
        reaped = [pid for pid in doomed if _reaped(pid)]
        if not reaped:
            time.sleep(0.001)


def _reaped(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return False


def _listed() -> Iterator[int]:
    for thread in _SELF.iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            yield from map(int, (thread / "children").read_text().split())


def _searched() -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()  # the name before may hold anything
            if int(fields[1]) == os.getpid():
                yield int(entry.name)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


_LISTS_CHILDREN = (_SELF / str(os.getpid()) / "children").exists()  # a kernel may be built without
