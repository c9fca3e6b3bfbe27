"""harness.world: what is imported before ranks start, and ranks that do not start."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_functions as on_rank

from harness.world import Blocked, Died, Outcome, Pool, Raised, WorldError
from harness.world.crew import Crew
from harness.world.starting import wait_until_ready
from harness.world.watch import CAN_WATCH

linux_only = pytest.mark.skipif(not CAN_WATCH, reason="only Linux tells what a process does")


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    with Pool(2, preload=["rank_functions"]) as pool:
        yield pool


def raised(outcome: Outcome, rank: int) -> Raised:
    ending = outcome.ranks[rank]
    assert isinstance(ending, Raised), f"rank {rank} did not raise: {outcome}"
    return ending


# --- ranks that do not start


def test_ranks_that_cannot_start_are_no_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path)
    monkeypatch.setattr("harness.world.crew._make_store", lambda: (os.open(os.devnull, os.O_RDWR), folder))
    monkeypatch.setattr("harness.world.pool.START_TIMEOUT", 10.0)
    with Pool(1) as pool, pytest.raises(WorldError, match=r"rank 0 of 1 could not start|did not start within"):
        pool.run(on_rank.who)


def test_ranks_that_wait_for_ever_to_start_say_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.world.crew._make_store", lambda: (os.open(os.devnull, os.O_RDWR), None))
    crew = Crew(2)
    try:
        with pytest.raises(WorldError, match=r"ranks \[0, 1\] did not start within 8 s: they have not .*") as error:
            wait_until_ready(crew, 8.0)
        assert str(error.value).count("in init_process_group") == 2
    finally:
        crew.kill()


# --- preloading


def test_preloading_is_quiet_and_forgives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    good = "import os, warnings; print('noise'); warnings.warn('noise'); os.system('echo noise'); pid = os.getpid()\n"
    (tmp_path / "preload_good.py").write_text(good + "def get(context): return pid\n")
    for name, statement in [("raises", "raise ValueError('broken')"), ("leaves", "import sys; sys.exit(3)")]:
        (tmp_path / f"preload_{name}.py").write_text(f"print('noise'); {statement}\n")
    with Pool(2, preload=["preload_raises", "preload_leaves", "preload_no_such", "preload_good"]) as pool:
        ones = pool.run("preload_good:get").values()
        assert ones[0] == ones[1], "imported once, before the ranks were forked"
        assert not set(ones) & {*pool.pids, os.getpid()}
        assert "noise" not in "".join(capfd.readouterr())
        assert raised(pool.run("preload_raises:get"), 0).message == "broken"
        assert raised(pool.run("preload_leaves:get"), 0).type_name == "SystemExit"


def test_a_preload_that_kills_the_server_is_left_out(
    pair: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "preload_kills.py").write_text("import os; os._exit(5)\n")
    pair.run(on_rank.who)
    with Pool(1, preload=["preload_kills"]) as pool:
        assert pool.run(on_rank.who).kind == "ok"
        assert pool.run("preload_kills:f").ranks == (Died(5, "exited with code 5 without returning"),)
    assert pair.run(on_rank.who).kind == "ok", "another pool of the dead server has new ranks, and no crash"


@linux_only
def test_a_preload_that_hangs_is_a_hang_of_the_job(pair: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "preload_hangs.py").write_text("import time\ndef wait(): time.sleep(600)\nwait()\n")
    assert pair.run(on_rank.who).kind == "ok", "idle ranks of the same server from here on, which are no work of it"
    began = time.monotonic()
    with Pool(2, deadline=120.0, preload=["preload_hangs"]) as pool:
        outcome = pool.run("preload_hangs:f")
        assert time.monotonic() - began < 90.0, "long before ranks are given up that do not start"
        assert outcome.kind == "hang"
        for ending in outcome.ranks:
            assert isinstance(ending, Blocked)
            assert 'preload_hangs.py", line 2 in wait' in ending.stack
        assert pool.run(on_rank.who).kind == "ok"


@linux_only
def test_a_preload_that_works_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own too, as a compiler does."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("harness.world.pool.QUIET_IMPORT", 1.0)
    busy = "import time; end = time.monotonic() + 3\nwhile time.monotonic() < end: pass"
    code = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}]); pid = os.getpid()\n"
    (tmp_path / "preload_works.py").write_text(code + "def get(context): return pid\n")
    with Pool(2, quiet=1.0, deadline=120.0, preload=["preload_works"]) as pool:
        ones = pool.run("preload_works:get").values()
        assert ones[0] == ones[1], "imported once, by the server"
