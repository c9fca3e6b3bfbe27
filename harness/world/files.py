"""Files that the ranks and the parent share and that have no name: nothing stays behind whoever dies, and how."""

from __future__ import annotations

import mmap
import os
import struct
import sys
import tempfile
from pathlib import Path

HAS_MEMFD = sys.platform == "linux" and Path("/proc/self/fd").exists()

_HEAD = struct.Struct("<QI")  # how many texts were written so far, and the length of the one that is there
SLOT_BYTES = 4096


def nameless(purpose: str, size: int = 0) -> int:
    """An open file of so many bytes without a name; its descriptor. ``purpose`` shows in /proc only."""
    if HAS_MEMFD:
        fd = os.memfd_create(f"shardproof-{purpose}", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:  # its name is gone once it is open
            fd = os.dup(file.fileno())
    os.truncate(fd, size)
    return fd


def path_of(fd: int) -> str | None:
    """A path under which this process can open its nameless file anew; None where the system has none."""
    return f"/proc/self/fd/{fd}" if HAS_MEMFD else None


class Slots:
    """Shared memory with two texts a rank, for what must be readable while the rank is stuck: the last collective that
    it began, and what its job tells.

    Each rank writes its own; the parent reads when ranks are stuck, so a text that is torn by a running rank is
    possible and harmless.
    """

    def __init__(self, fd: int, ranks: int) -> None:
        self._ranks = ranks
        self._memory = mmap.mmap(fd, 2 * ranks * SLOT_BYTES)

    @staticmethod
    def create(ranks: int) -> int:
        """The file for so many ranks."""
        return nameless("slots", 2 * ranks * SLOT_BYTES)

    def write(self, rank: int, text: str) -> None:
        """Replaces the rank's text, cut to what fits, and counts it."""
        data = text.encode("utf-8", "replace")[: SLOT_BYTES - _HEAD.size]
        at = rank * SLOT_BYTES
        count = self.count(rank)
        self._memory[at + _HEAD.size : at + _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._memory, at, count + 1, len(data))

    def clear(self, rank: int) -> None:
        """The rank has no text."""
        _HEAD.pack_into(self._memory, rank * SLOT_BYTES, self.count(rank), 0)

    def tell(self, rank: int, text: str) -> None:
        """Replaces what the rank's job tells; an empty text for nothing. It is no progress."""
        self.write(self._ranks + rank, text)

    def told(self, rank: int) -> str | None:
        """What the rank's job told last."""
        return self.read(self._ranks + rank)

    def read(self, rank: int) -> str | None:
        """The rank's text; None for none."""
        at = rank * SLOT_BYTES
        length: int = _HEAD.unpack_from(self._memory, at)[1]
        data = self._memory[at + _HEAD.size : at + _HEAD.size + length]
        return data.decode("utf-8", "replace") or None

    def count(self, rank: int) -> int:
        """How many texts the rank has written in its life."""
        count: int = _HEAD.unpack_from(self._memory, rank * SLOT_BYTES)[0]
        return count

    def close(self) -> None:
        self._memory.close()
