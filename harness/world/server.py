"""The rank server: a process that has torch imported and forks ranks from itself.

Not multiprocessing's, because that one leaves a named socket in a temporary folder, outlives a parent that was killed
as long as ranks live, runs the caller's ``__main__`` again and is shared with whatever else the caller's program does
with it. This one hangs on one socket: when the parent's end closes, however the parent ended, the server kills every
rank, and what ranks have started, and goes.

    parent -> server   "preload": module names | "crew": number, world size (file: its lease) |
                       "rank": crew, rank, ... (files: the rank's own)
    lease  -> parent   STARTED rank pid | ENDED rank code     parent -> lease   STACKS; closed: kill this crew
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from harness.world import wire
from harness.world.descendants import adopt_orphans, children, die_with_parent, kill_children
from harness.world.preloading import import_ours, import_theirs

EVENT = struct.Struct("<ciq")
STARTED, ENDED, STACKS = b"S", b"E", b"D"
STACK_SIGNAL = signal.SIGUSR1
MOST_FILES = 8


@dataclass
class _Crew:
    lease: socket.socket
    left_behind: str | None  # a named file to remove at the end, where the system has no nameless ones
    ranks: dict[int, int] = field(default_factory=dict)  # pid to rank, the living


def main(fd: int, starter: int | None) -> NoReturn:
    """Serves the process at the other end of the socket until it closes. starter: the parent, where that is known; the
    server ends with it."""
    server = _Server(socket.socket(fileno=fd), starter)
    code = 0
    try:
        server.serve()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        server.kill_all()
        os._exit(code)


class _Server:
    def __init__(self, control: socket.socket, starter: int | None) -> None:
        self._control = control
        self._starter = starter
        self._crews: dict[int, _Crew] = {}
        self._helpers: set[int] = set()  # started by preloaded modules, whose ranks may need them
        adopt_orphans()
        self._signal_r, self._signal_w = os.pipe()
        os.set_blocking(self._signal_r, False)
        os.set_blocking(self._signal_w, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._signal_w, warn_on_full_buffer=False)

    def serve(self) -> None:
        self._preload(import_ours)
        while self._starter in (None, os.getppid()):
            leases = {crew.lease.fileno(): number for number, crew in self._crews.items()}
            control = self._control.fileno()
            # The timeout is for a starter that is killed, and a parent whose socket a forked child of it still holds.
            ready, _, _ = select.select([self._signal_r, control, *leases], [], [], 0.5)
            if self._signal_r in ready:
                os.read(self._signal_r, 4096)
                self._reap()
            for lease, number in leases.items():
                if lease in ready:
                    self._obey(number)
            if control in ready:
                try:
                    payload, fds = wire.receive_with_fds(self._control, MOST_FILES)
                except (EOFError, ConnectionError):
                    return
                self._handle(pickle.loads(payload), fds)

    def kill_all(self) -> None:
        for number in list(self._crews):
            # A parent that still listens learns that the server went, and no rank by itself.
            self._end(number, tell=False)
        kill_children()

    def _handle(self, request: dict[str, Any], fds: list[int]) -> None:
        match request.pop("what"):
            case "preload":
                sys.path[:] = request["path"]
                self._preload(lambda: import_theirs(request["modules"]))
            case "crew":
                self._crews[request["crew"]] = _Crew(socket.socket(fileno=fds[0]), request["left_behind"])
            case "rank":
                crew = self._crews.get(request.pop("crew"))
                if crew is not None:
                    self._fork(crew, request, fds)
                for fd in fds:
                    os.close(fd)

    def _fork(self, crew: _Crew, order: dict[str, Any], fds: list[int]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a preloaded module with a thread: its matter, and usually well
            pid = os.fork()
        if pid == 0:
            self._become_rank(order, fds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # here and in the rank: whoever comes first
        crew.ranks[pid] = order["rank"]
        _tell(crew, STARTED, order["rank"], pid)

    def _become_rank(self, order: dict[str, Any], fds: list[int]) -> NoReturn:
        server = os.getppid()
        try:
            with contextlib.suppress(PermissionError):
                os.setpgid(0, 0)  # a group of its own, so that what it starts is killed with it
            die_with_parent(signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # or a terminal may stop a group that writes
            self._control.close()
            for crew in self._crews.values():
                crew.lease.close()
            os.close(self._signal_r)
            os.close(self._signal_w)
            from harness.world import worker

            worker.work(fds, **order)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)  # whatever happens, this process must not go on as a server

    def _obey(self, number: int) -> None:
        """A crew's lease has something: an order, or its end."""
        crew = self._crews[number]
        try:
            orders = crew.lease.recv(64)
        except ConnectionError:
            orders = b""
        if not orders:
            self._end(number)
        elif STACKS in orders:
            for pid in crew.ranks:
                os.kill(pid, STACK_SIGNAL)  # not reaped yet, so that the pid is still theirs

    def _end(self, number: int, *, tell: bool = True) -> None:
        crew = self._crews.pop(number)
        for pid in crew.ranks:
            _kill_group(pid)
            os.kill(pid, signal.SIGKILL)  # it may have left its group
        for pid, rank in crew.ranks.items():
            _, status = os.waitpid(pid, 0)
            if tell:
                _tell(crew, ENDED, rank, os.waitstatus_to_exitcode(status))
        self._kill_orphans()
        if crew.left_behind is not None:
            with contextlib.suppress(OSError):
                Path(crew.left_behind).unlink()
        crew.lease.close()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for crew in self._crews.values():
                if pid in crew.ranks:
                    _kill_group(pid)  # what the rank started and left
                    _tell(crew, ENDED, crew.ranks.pop(pid), os.waitstatus_to_exitcode(status))
                    self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Kills what dead ranks have left, in whatever group or session it is.

        A living rank's background processes may have lost their parent too: they are in the rank's group.
        """
        ranks = {pid for crew in self._crews.values() for pid in crew.ranks}
        self._helpers &= children()
        kill_children(lambda pid: pid in ranks or pid in self._helpers or _group_of(pid) in ranks)

    def _preload(self, load: Callable[[], None]) -> None:
        before = children()
        # While an import runs nobody watches the socket, so that the kernel must.
        if self._starter is not None:
            die_with_parent(signal.SIGKILL)
        load()
        if self._starter is not None:
            die_with_parent(0)  # from here on the socket tells, and what ranks have started is killed too
        self._helpers |= children() - before


def _tell(crew: _Crew, event: bytes, rank: int, number: int) -> None:
    with contextlib.suppress(OSError):  # the parent has given this crew up
        crew.lease.sendall(EVENT.pack(event, rank, number))


def _kill_group(rank: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank, signal.SIGKILL)


def _group_of(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None
