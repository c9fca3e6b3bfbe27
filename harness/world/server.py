"""The rank server: a process that has torch imported and forks ranks from itself.

Not multiprocessing's, because that one leaves a named socket in a temporary folder, outlives a parent that was killed
as long as ranks live, runs the caller's ``__main__`` again and is shared with whatever else the caller's program does
with it. This one hangs on one socket: when the parent's end closes, however the parent ended, the server kills every
rank and goes.

    parent -> server   "preload": module names | "crew": number, world size (file: its lease) |
                       "rank": crew, rank, ... (files: the rank's own)
    lease  -> parent   STARTED rank pid | ENDED rank code     parent -> lease   STACKS; closed: kill this crew
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from harness.world import wire

EVENT = struct.Struct("<ciq")
STARTED, ENDED, STACKS = b"S", b"E", b"D"
STACK_SIGNAL = signal.SIGUSR1
MOST_FILES = 8
# Every rank needs these, and importing them there would cost each rank a second or more.
OURS = ("numpy", "torch", "torch.distributed", "harness.world.worker")


@dataclass
class _Crew:
    lease: socket.socket
    left_behind: str | None  # a named file to remove at the end, where the system has no nameless ones
    ranks: dict[int, int] = field(default_factory=dict)  # pid to rank, the living


def main(fd: int, parent: int, armed: bool) -> NoReturn:
    """Serves the process at the other end of the socket until it closes. armed: the kernel may watch the parent."""
    server = _Server(socket.socket(fileno=fd), parent, armed)
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
    def __init__(self, control: socket.socket, parent: int, armed: bool) -> None:
        self._control = control
        self._armed = armed
        # A launcher between us and the parent hides its pid; then the socket alone tells its end.
        self._parent = parent if os.getppid() == parent else None
        self._crews: dict[int, _Crew] = {}
        self._signal_r, self._signal_w = os.pipe()
        os.set_blocking(self._signal_r, False)
        os.set_blocking(self._signal_w, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._signal_w, warn_on_full_buffer=False)

    def serve(self) -> None:
        self._preload(OURS, loud=True)
        while self._parent in (None, os.getppid()):
            leases = {crew.lease.fileno(): number for number, crew in self._crews.items()}
            control = self._control.fileno()
            # The timeout is for a parent whose socket a forked child of it still holds.
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
            self._end(number)

    def _handle(self, request: dict[str, Any], fds: list[int]) -> None:
        match request.pop("what"):
            case "preload":
                sys.path[:] = request["path"]
                self._preload(request["modules"])
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
            _die_with_parent(signal.SIGKILL)
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

    def _end(self, number: int) -> None:
        crew = self._crews.pop(number)
        for pid in crew.ranks:
            _kill_group(pid)
        for pid, rank in crew.ranks.items():
            _, status = os.waitpid(pid, 0)
            _tell(crew, ENDED, rank, os.waitstatus_to_exitcode(status))
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
            _kill_group(pid)  # what the rank started and left
            for crew in self._crews.values():
                if pid in crew.ranks:
                    _tell(crew, ENDED, crew.ranks.pop(pid), os.waitstatus_to_exitcode(status))

    def _preload(self, modules: tuple[str, ...], *, loud: bool = False) -> None:
        """Imports what ranks need. A module that fails is left to the ranks, which report how it fails."""
        # While an import runs nobody watches the socket, so that the kernel must.
        if self._armed:
            _die_with_parent(signal.SIGKILL)
        for module in modules:
            if module in sys.modules:
                continue
            try:
                with contextlib.nullcontext() if loud else _silence():
                    importlib.import_module(module)
            except BaseException:
                if loud:
                    raise
        gc.collect()
        gc.freeze()  # the collector would write to every page and so unshare it
        if self._armed:
            _die_with_parent(0)  # from here on the socket tells, and what ranks have started is killed too


def _tell(crew: _Crew, event: bytes, rank: int, number: int) -> None:
    with contextlib.suppress(OSError):  # the parent has given this crew up
        crew.lease.sendall(EVENT.pack(event, rank, number))


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
            return


def _die_with_parent(signal_number: int) -> None:
    """Asks the kernel for this signal at the parent's death, where it can (Linux); 0: no more."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal_number), 0, 0, 0)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Nothing is printed, not even by C code: a rank that imports the module again prints it."""
    kept = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        with warnings.catch_warnings():
            for fd in (1, 2):
                os.dup2(nowhere, fd)
            yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        for fd, saved in zip((1, 2), kept, strict=True):
            os.dup2(saved, fd)
            os.close(saved)
        os.close(nowhere)
