"""One generation of rank processes: started together, talked to, looked at, killed together."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.world import files, wire
from harness.world.forkserver import FORKSERVER, search_path
from harness.world.server import ENDED, EVENT, STACKS, STARTED
from harness.world.stacks import trimmed

_numbers = itertools.count()


class Crew:
    """The ranks of one world, from fork to kill. Nothing here waits, except where it says so.

    pids: the rank processes that have started. codes: exit codes of those that have ended (negative: the signal).
    gone: the server has nothing more to say about this crew. ready_at: when all ranks were seen to have their group.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self.gone = False
        self.ready_at: float | None = None
        self._paused = False
        self._messages: dict[int, list[tuple[str, Any]]] = {rank: [] for rank in range(world_size)}
        self._lost: set[int] = set()
        self._owner = os.getpid()
        self._inboxes = [wire.Inbox() for _ in range(world_size)]
        self._events = bytearray()
        self._links: list[socket.socket] = []
        self._stacks = [files.nameless("stack") for _ in range(world_size)]
        slots = files.Slots.create(world_size)
        self.slots = files.Slots(slots, world_size)
        self._store, named = _make_store()
        self._lease, theirs = socket.socketpair()
        self._lease.setblocking(False)
        number = next(_numbers)
        with theirs:
            FORKSERVER.send({"what": "crew", "crew": number, "left_behind": named}, [theirs.fileno()])
        order: dict[str, Any] = {"what": "rank", "crew": number, "world_size": world_size, "path": search_path()}
        order["folder"] = str(Path.cwd())
        for rank in range(world_size):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            self._links.append(ours)
            with theirs:
                fds = [theirs.fileno(), self._stacks[rank], slots, self._store]
                FORKSERVER.send({**order, "rank": rank, "store": named}, fds)
        os.close(slots)

    def send(self, payload: bytes, timeout: float) -> None:
        """Sends the same payload to every rank, for at most so many seconds each.

        A rank that cannot take it is dead or stuck, which will show when it does not answer.
        """
        for link in self._links:
            with contextlib.suppress(OSError):
                link.settimeout(timeout)
                link.sendall(wire.frame(payload))
            with contextlib.suppress(OSError):
                link.setblocking(False)

    def pump(self, timeout: float) -> None:
        """Takes in what ranks and server have sent, waiting at most so many seconds for the first of it."""
        sources: dict[socket.socket, int | None] = {link: r for r, link in enumerate(self._links) if link.fileno() >= 0}
        if not self.gone:
            sources[self._lease] = None
        poller = select.poll()  # not select.select, which fails from descriptor 1024 on
        by_fd = {source.fileno(): source for source in sources}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        if not by_fd:
            time.sleep(timeout)
        for fd, _ in poller.poll(timeout * 1000) if by_fd else ():
            rank = sources[by_fd[fd]]
            if rank is None:
                self._take_events()
            else:
                self._take_messages(rank)

    def take(self, rank: int) -> tuple[str, Any] | None:
        """The rank's next message, a kind and a body; None where there is none yet."""
        if not self._messages[rank] and rank in self.codes:
            self._take_messages(rank)  # its end may overtake its last words
        return self._messages[rank].pop(0) if self._messages[rank] else None

    def how_ended(self, rank: int) -> str:
        """In words how a rank's process ended."""
        if rank in self._lost:
            return "killed, as the rank server was"
        code = self.codes[rank]
        if code >= 0:
            return f"exited with code {code} without returning"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"killed by {name}"

    def living(self, ranks: Iterable[int]) -> list[int]:
        """The pids of those ranks that have not ended."""
        return [self.pids[r] for r in ranks if r in self.pids and r not in self.codes]

    def progress(self, ranks: Iterable[int]) -> object:
        """Differs from what it was before when one of these ranks has begun a collective, or any has told the others
        something through the store, as all do who make a group: that file only grows, and waiting does not write."""
        return [self.slots.count(rank) for rank in ranks], os.fstat(self._store).st_size

    def pause(self) -> None:
        """Stops the idle ranks: every gloo group has a thread that polls, and hundreds of them fill a core."""
        self._signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """Lets paused ranks go on. Does nothing to others."""
        if self._paused:
            self._signal(signal.SIGCONT)
            self._paused = False

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.living(range(self.world_size)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stacks(self, ranks: Iterable[int], patience: float = 2.0) -> dict[int, str]:
        """The Python stacks of these ranks, waited for. Afterwards the crew is only good for killing."""
        with contextlib.suppress(OSError):
            self._lease.sendall(STACKS)
        texts = dict.fromkeys(ranks, b"")
        pending = set(texts)
        end = time.monotonic() + patience
        while pending and time.monotonic() < end:
            time.sleep(0.02)
            for rank in list(pending):
                text = os.pread(self._stacks[rank], 1 << 20, 0)
                if text and text == texts[rank]:  # it has stopped growing
                    pending.remove(rank)
                texts[rank] = text
        return {rank: trimmed(text.decode("utf-8", "replace")) for rank, text in texts.items()}

    def kill(self, patience: float = 5.0) -> None:
        """Kills the ranks and waits until they are gone. Does nothing the second time, or in a forked child."""
        if self._owner != os.getpid() or not self._links:
            return
        with contextlib.suppress(OSError):
            self._lease.shutdown(socket.SHUT_WR)  # the server kills, as it alone knows the pids to be theirs still
        end = time.monotonic() + patience
        try:
            while not self.gone and time.monotonic() < end:
                self._wait_for_lease(end - time.monotonic())
        finally:
            for link in (*self._links, self._lease):
                link.close()
            self._links = []
            for fd in (*self._stacks, self._store):
                os.close(fd)
            self.slots.close()

    def _wait_for_lease(self, timeout: float) -> None:
        poller = select.poll()
        poller.register(self._lease, select.POLLIN)
        if poller.poll(max(0.0, timeout) * 1000):
            self._take_events()

    def _take_events(self) -> None:
        try:
            data = self._lease.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self.gone = True
            # A server that died took the ranks along and could not say so.
            self._lost = set(range(self.world_size)) - self.codes.keys()
            self.codes.update(dict.fromkeys(self._lost, -signal.SIGKILL))
            return
        self._events += data
        whole = len(self._events) // EVENT.size * EVENT.size
        for event, rank, number in EVENT.iter_unpack(bytes(self._events[:whole])):
            if event == STARTED:
                self.pids[rank] = number
            elif event == ENDED:
                self.codes[rank] = number
        del self._events[:whole]

    def _take_messages(self, rank: int) -> None:
        link = self._links[rank]
        while link.fileno() >= 0:
            try:
                data = link.recv(1 << 20)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                link.close()
                return
            for payload in self._inboxes[rank].feed(data):
                self._messages[rank].append(wire.load(payload))


def _make_store() -> tuple[int, str | None]:
    """The file through which ranks find each other, and its path where it needs a name."""
    if files.HAS_MEMFD:
        return files.nameless("store"), None
    fd, name = tempfile.mkstemp(prefix="shardproof-store-")
    return fd, name
