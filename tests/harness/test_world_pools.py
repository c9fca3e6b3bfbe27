"""harness.world: how pools come and go, and what they import beforehand."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import rank_functions as on_rank

from harness.world import Outcome, Pool, Pools, Raised
from harness.world.forkserver import FORKSERVER

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to who asks for them")


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    with Pool(2, preload=["rank_functions"]) as pool:
        yield pool


def raised(outcome: Outcome, rank: int) -> Raised:
    ending = outcome.ranks[rank]
    assert isinstance(ending, Raised), f"rank {rank} did not raise: {outcome}"
    return ending


# --- pools


def test_a_job_that_nobody_asked_for_is_abandoned(pair: Pool) -> None:
    forgotten = pair.start(on_rank.sleeps, 600.0)
    assert pair.run(on_rank.who).kind == "ok"
    with pytest.raises(RuntimeError, match="abandoned"):
        forgotten.result()


def test_an_interrupted_wait_kills_the_ranks(pair: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pair.pids
    pending = pair.start(on_rank.sleeps, 600.0)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("harness.world.crew.Crew.pump", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pending.result()
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)
    assert pair.run(on_rank.who).kind == "ok"


def test_a_closed_pool_is_closed() -> None:
    pool = Pool(1)
    pids = pool.pids
    pool.close()
    pool.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(on_rank.who)


def test_pools_have_one_pool_a_size() -> None:
    with Pools() as pools:
        assert pools.get(1) is pools.get(1)
        pids = pools.get(1).pids + pools.get(2).pids
        pools.restart_all()
        assert not set(pids) & set(pools.get(1).pids + pools.get(2).pids)
    with pytest.raises(RuntimeError, match="closed"):
        pools.get(1)


def test_no_files_stay_open() -> None:
    Pool(2).close()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with Pool(2) as pool:
            pool.run(on_rank.who)
            pool.run(on_rank.dies_on_rank_1, "exit")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    "arguments", [{"world_size": 0}, {"world_size": 1, "deadline": 0.0}, {"world_size": 1, "quiet": float("nan")}]
)
def test_nonsense_is_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Pool(**arguments)  # type: ignore[arg-type]


# --- what ranks have started


def gone(pids: Iterable[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@linux_only
def test_nothing_that_ranks_start_outlives_them() -> None:
    with Pool(2) as pool, Pool(1) as other:
        (others,) = other.run(on_rank.starts_processes).values()
        started = pool.run(on_rank.starts_processes).values()
        pids = [pid for each in started for pid in each.values()]
        assert len({*pids, *others.values()}) == 12
        assert not any(gone([pid]) for pid in pids)
        pool.restart()
        assert gone(pids)
        daemon = others.pop("daemon")
        assert not any(gone([pid]) for pid in others.values()), "the ranks that started these live on"
        assert other.run(on_rank.who).kind == "ok"
    assert gone([daemon, *others.values()])


@linux_only
def test_nothing_that_a_rank_starts_outlives_its_crash(pair: Pool, tmp_path: Path) -> None:
    assert pair.run(on_rank.starts_processes_and_dies, str(tmp_path)).kind == "crash"
    for rank in ("0", "1"):
        assert gone(map(int, (tmp_path / rank).read_text().split()))


@linux_only
def test_a_rank_that_leaves_its_group_is_killed_all_the_same(pair: Pool) -> None:
    before = pair.pids
    assert pair.run(on_rank.leaves_its_group, deadline=1.0).kind == "hang"
    assert gone(before)


@linux_only
def test_processes_of_a_preloaded_module_live_as_long_as_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = "import subprocess\npid = subprocess.Popen(['sleep', '600']).pid\ndef get(context): return pid\n"
    (tmp_path / "preload_helped.py").write_text(code)
    with Pool(1, preload=["preload_helped"]) as pool:
        (helper,) = pool.run("preload_helped:get").values()
        pool.restart()
        assert pool.run("preload_helped:get").values() == [helper]
        assert not gone([helper])
    FORKSERVER.stop()
    assert gone([helper])
