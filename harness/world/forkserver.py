"""The parent's side of the rank server: starts it once per process, and again when it has died."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.world import wire
from harness.world.guardian import END

# Ranks share few cores, so that one thread each is faster; and one order of summation is reproducible.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
# The user's own setting wins here: a fixed order of sets, and a look for GPUs that does not spoil forking.
_DEFAULTS = {"PYTHONHASHSEED": "0", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

# The terminal's Ctrl-C and a SIGTERM to the process group are the parent's to handle: its end is the server's.
_ENDINGS = {signal.SIGINT, signal.SIGTERM}
_CODE = """
import ctypes, signal, sys
if {armed}:
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # while it imports, the kernel kills it with its parent
for ending in (signal.SIGINT, signal.SIGTERM):
    signal.signal(ending, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
sys.path[:] = {path}
from harness.world.guardian import main
main({fd}, {parent}, {armed})
"""


@dataclass(frozen=True)
class Suspect:
    """A rank server that may hang, since it imports modules of the user's. pid: its own or its guardian's."""

    pid: int
    modules: tuple[str, ...]


class ForkServer:
    """The rank server of this process, and its guardian, which is the child of this process. Safe to use from several
    threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._asked: set[str] = set()
        self._distrusted: set[str] = set()

    def preload(self, modules: Sequence[str]) -> None:
        """Starts the server if there is none, and has it import these modules. Returns at once."""
        with self._lock:
            self._ensure()
            new = tuple(m for m in modules if m not in self._asked | self._distrusted)
            if new:
                self._asked.update(new)
                self.send({"what": "preload", "modules": new, "path": search_path()})

    def send(self, request: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Asks the server for something. A server that just died shows at the crew's lease, not here."""
        with self._lock:
            self._ensure()
            assert self._control is not None
            with contextlib.suppress(ConnectionError):
                wire.send_with_fds(self._control, pickle.dumps(request), list(fds))

    def distrust(self) -> None:
        """The server died or hangs, which importing the user's modules can do: a new one does without them."""
        with self._lock:
            self._distrusted |= self._asked
            self.stop()

    def suspect(self) -> Suspect | None:
        """The server where it was asked to import something of the user's."""
        with self._lock:
            if self._process is None or self._owner != os.getpid() or not self._asked:
                return None
            return Suspect(self._process.pid, tuple(sorted(self._asked)))

    def stop(self) -> None:
        """Ends the server and with it every rank; returns when they are gone. The next request starts a new one."""
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                return
            process, control = self._process, self._control
            self._forget()
            if control is not None:
                # Not close alone: a forked child of this process may hold the socket too.
                with contextlib.suppress(OSError):
                    control.shutdown(socket.SHUT_RDWR)
                control.close()
            try:
                process.wait(2.0)
            except subprocess.TimeoutExpired:  # the server imports something; its ranks die with it
                process.send_signal(END)
                process.wait()

    def _forget(self) -> None:
        self._process = self._control = None
        self._asked = set()

    def _ensure(self) -> None:
        if self._process is not None and self._owner != os.getpid():
            self._forget()  # we are a forked child: that server is our parent's
        if self._process is not None and (self._process.poll() is not None or _hung_up(self._control)):
            self.stop()
        if self._process is None:
            self._launch()

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        # The kernel's notice is of the death of the thread that forked: of use from the main thread alone.
        armed = sys.platform == "linux" and threading.current_thread() is threading.main_thread()
        code = _CODE.format(path=search_path(), fd=theirs.fileno(), parent=os.getpid(), armed=armed)
        environment = {**_DEFAULTS, **os.environ, **_ENVIRONMENT}
        interface = _loopback()
        if interface is not None:
            # Otherwise gloo looks this machine's own name up, which can take seconds or fail.
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        with theirs, _interrupts_held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],  # -P: no module of the working folder stands in for one of Python's
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_stderr(),  # what ranks print must not end in the middle of the parent's output
                stderr=_stderr(),
                env=environment,
            )
        self._control, self._owner = ours, os.getpid()


def _hung_up(control: socket.socket | None) -> bool:
    """Whether the server has closed its end, as it does by ending; its guardian ends a moment later."""
    poller = select.poll()
    if control is not None:
        poller.register(control, 0)
    return bool(poller.poll(0))


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """A child that starts here inherits Ctrl-C blocked, until it has said that it ignores it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def search_path() -> list[str]:
    """This process's sys.path as other processes understand it."""
    return [str(Path.cwd() / entry) for entry in sys.path if isinstance(entry, str)]


def _stderr() -> int:
    try:
        os.fstat(2)
    except OSError:  # a daemon that closed it
        return subprocess.DEVNULL
    return 2


def _loopback() -> str | None:
    with contextlib.suppress(OSError):
        names = {name for _, name in socket.if_nameindex()}
        return next((name for name in ("lo", "lo0") if name in names), None)
    return None


FORKSERVER = ForkServer()
atexit.register(FORKSERVER.stop)


def warm_up(preload: Sequence[str] = ()) -> None:
    """Starts the rank server in the background and has it import torch and these modules. Returns at once."""
    FORKSERVER.preload(preload)
