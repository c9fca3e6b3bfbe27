"""The process between the parent and the rank server: it starts the server, and ends whatever that leaves.

The server imports the user's modules, so that it can hang, crash, or be killed for its memory, and then kills nobody.
This one imports nothing, and becomes the parent of all that the server and its ranks have started.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from harness.world import server
from harness.world.descendants import adopt_orphans, die_with_parent, kill_children

END = signal.SIGUSR2  # "end now", from the parent or from the kernel when the parent is gone
_WAKING = (signal.SIGCHLD, END)


def main(fd: int, parent: int, armed: bool) -> NoReturn:
    """Serves the process at the other end of the socket until it closes. armed: the kernel may watch the parent."""
    # A launcher between us and the parent hides its pid; then the socket alone tells its end.
    watched = parent if os.getppid() == parent else None
    if sys.platform != "linux":
        server.main(fd, watched)
    os.setpgid(0, 0)  # a SIGKILL to the parent's whole group must not end who cleans up
    adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKING)
    here = os.getpid()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKING)
        server.main(fd, here)
    os.close(fd)
    if armed:
        die_with_parent(END)
    while watched in (None, os.getppid()):
        woken = signal.sigtimedwait(_WAKING, 0.5)
        if (woken is not None and woken.si_signo == END) or _has_ended(child):
            break
    kill_children()
    os._exit(0)


def _has_ended(child: int) -> bool:
    """Whether the server has; reaps what else has."""
    while True:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid in (0, child):
            return pid == child
