"""How large a world this machine allows."""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
# Measured: a rank forked from the server has 12 MiB of its own after a small job, and 108 MiB once it has imported
# PyTorch's compiler. The server and the caller have 250 MiB each.
RANK_BYTES = 128 * MIB
FIXED_BYTES = 512 * MIB
# Of the available memory; the rest is for what else runs here.
_SHARE = 0.8
# Measured: a rank holds 12 files and one more for each peer in each group. Meshes have a handful of groups a rank.
_FILES = 64
_FILES_A_PEER = 8
# Beyond this, ranks that take turns on a core make every collective take seconds.
RANKS_A_CORE = 32


@dataclass(frozen=True)
class WorldLimit:
    """The largest world, and in words what does not allow a larger one."""

    ranks: int
    why: str


def max_world() -> WorldLimit:
    """The largest world that this machine allows now: by memory, open files and cores. At least 1."""
    cores = _cores()
    limits = [WorldLimit(RANKS_A_CORE * cores, f"{RANKS_A_CORE} ranks a core, {cores} cores")]
    memory = available_memory()
    if memory is not None:
        ranks = int((memory * _SHARE - FIXED_BYTES) // RANK_BYTES)
        limits.append(WorldLimit(ranks, f"{memory // MIB} MiB of memory available, {RANK_BYTES // MIB} MiB a rank"))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY:
        ranks = (files - _FILES) // _FILES_A_PEER
        limits.append(WorldLimit(ranks, f"{files} open files a process (ulimit -n)"))
    least = min(limits, key=lambda limit: limit.ranks)
    return WorldLimit(max(1, least.ranks), least.why)


def available_memory() -> int | None:
    """Bytes that this process and its children may still use, on the machine and in its containers; None: unknown."""
    found = [*_free_of_machine(), *_free_of_cgroups()]
    return max(0, min(found)) if found else None


def _free_of_machine() -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
        return
    with contextlib.suppress(OSError, ValueError):
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _free_of_cgroups() -> Iterator[int]:
    for folder in _cgroups("memory"):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                most = int((folder / limit).read_text())
                used = int((folder / usage).read_text())
                yield most - used + _cache(folder)


def _cache(folder: Path) -> int:
    """Bytes that count as used and are given back when they are needed."""
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "inactive_file":
                return int(number)
    return 0


def _cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            cores = min(cores, math.ceil(quota / period))
        with contextlib.suppress(OSError, ValueError):
            quota = int((folder / "cpu.cfs_quota_us").read_text())
            if quota > 0:
                period = int((folder / "cpu.cfs_period_us").read_text())
                cores = min(cores, math.ceil(quota / period))
    return max(1, cores)


def _cgroups(controller: str) -> Iterator[Path]:
    """The folders of this process's control groups, innermost first, the root of its container last."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup") / (controller if controllers else "")
        # In a container the path is often the host's and not to be seen; then the root is the container's own.
        inner = root / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents)
