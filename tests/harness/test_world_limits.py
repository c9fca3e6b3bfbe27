"""harness.world.limits: the largest world, and what is in its way."""

from __future__ import annotations

import resource

import pytest

from harness.world import limits, max_world


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_cores", lambda: 10)
    monkeypatch.setattr(limits, "available_memory", lambda: 1 << 45)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, 1 << 20))


def test_cores_bind() -> None:
    assert max_world() == limits.WorldLimit(320, "32 ranks a core, 10 cores")


def test_memory_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_memory", lambda: 4096 * limits.MIB)
    assert max_world() == limits.WorldLimit(21, "4096 MiB of memory available, 128 MiB a rank")


def test_open_files_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1024))
    assert max_world() == limits.WorldLimit(24, "256 open files a process (ulimit -n)")


def test_one_rank_is_always_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_memory", lambda: 0)
    assert max_world().ranks == 1


def test_this_machine_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert limits.available_memory() is None or limits.available_memory() > 0  # type: ignore[operator]
    assert 1 <= max_world().ranks <= 32 * 4096
