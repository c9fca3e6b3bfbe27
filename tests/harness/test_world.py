"""harness.world: jobs that end well, and jobs that end in every other way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_functions as on_rank
import torch

from harness.world import Blocked, Died, NotOk, Outcome, Pool, Pools, Raised, Returned, WorldError

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with Pools(preload=["rank_functions"]) as pools:
        yield pools


@pytest.fixture
def pair(pools: Pools) -> Pool:
    return pools.get(2)


def raised(outcome: Outcome, rank: int) -> Raised:
    ending = outcome.ranks[rank]
    assert isinstance(ending, Raised), f"rank {rank} did not raise: {outcome}"
    return ending


# --- jobs that are ok


def test_every_rank_runs_the_function(pools: Pools) -> None:
    outcome = pools.get(3).run(on_rank.who)
    assert outcome.kind == "ok", outcome
    assert [value[:2] for value in outcome.values()] == [(0, 3), (1, 3), (2, 3)]
    assert [value[2] for value in outcome.values()] == list(pools.get(3).pids)
    assert os.getpid() not in pools.get(3).pids


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_have_a_group(pools: Pools, world_size: int) -> None:
    expected = torch.full((2, 3), sum(10.0 + rank for rank in range(world_size)))
    for value in pools.get(world_size).run(on_rank.total, 10.0).values():
        assert torch.equal(value, expected)


@pytest.mark.parametrize("function", ["rank_functions:echo", f"{HERE / 'rank_functions.py'}:echo"])
def test_a_function_may_be_named(pair: Pool, function: str) -> None:
    assert pair.run(function, {"a": 1}).values() == [{"a": 1}, {"a": 1}]


def test_start_returns_at_once_and_the_result_stays(pair: Pool) -> None:
    pair.run(on_rank.who)
    before = time.monotonic()
    pending = pair.start(on_rank.sleeps, 1.0)
    assert time.monotonic() - before < 0.5
    outcome = pending.result()
    assert outcome.values() == ["done", "done"]
    assert 1.0 <= outcome.seconds < 5.0
    assert pending.result() is outcome


def test_results_wait_for_a_caller_who_is_late(pair: Pool) -> None:
    """The parent may compute beyond the deadline: what ranks did in time counts, even when the pipe was full."""
    pair.run(on_rank.who)
    pending = pair.start(on_rank.echo, b"x" * 5_000_000, deadline=0.2)
    time.sleep(0.5)
    assert [len(value) for value in pending.result().values()] == [5_000_000] * 2


def test_state_is_kept_as_long_as_the_processes(pair: Pool) -> None:
    pair.restart()
    assert [pair.run(on_rank.count).values() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    pair.restart()
    assert pair.run(on_rank.count).values() == [1, 1]


def test_history_names_the_jobs_before(pair: Pool) -> None:
    pair.restart()
    first = pair.run(on_rank.who, label="first")
    second = pair.run(on_rank.who)
    third = pair.run(on_rank.who)
    assert first.history == ()
    assert second.history == ("first",)
    assert third.history == ("first", "rank_functions:who")
    pair.restart()
    assert pair.run(on_rank.who).history == ()


def test_tensors_come_back_bit_by_bit(pools: Pools) -> None:
    (got,) = pools.get(1).run(on_rank.tensors).values()
    assert torch.equal(got["view"], torch.tensor([[5.0, 7.0], [6.0, 8.0]]))
    assert got["view"].untyped_storage().nbytes() == 16, "a view must not drag its storage along"
    expected = torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16)
    assert torch.equal(got["bfloat16"].view(torch.int16), expected.view(torch.int16))
    assert got["float8"].dtype == torch.float8_e4m3fn
    assert got["float8"].float().tolist() == [1.5, -2.0]
    assert got["bool"].tolist() == [[True, False]]
    assert got["complex"].tolist() == [1 - 2j]
    assert got["scalar"].shape == ()
    assert got["empty"].shape == (0, 4)
    assert got["empty"].dtype == torch.int64
    assert got["leaf"].requires_grad
    assert not got["bool"].requires_grad
    assert isinstance(got["parameter"], torch.nn.Parameter)
    assert got["array"].tolist() == [0, 1, 2]


# --- the same start for every job


def test_every_job_draws_the_same_numbers(pair: Pool) -> None:
    first = pair.run(on_rank.draw).values()
    pair.run(on_rank.spoils_everything)
    assert pair.run(on_rank.draw).values() == first
    assert first[0] == first[1], "and every rank"
    pair.restart()
    assert pair.run(on_rank.draw).values() == first, "and every generation of processes"


def test_settings_of_a_job_do_not_reach_the_next(pair: Pool) -> None:
    fresh = pair.run(on_rank.settings).values()
    assert pair.run(on_rank.spoils_everything).kind == "ok"
    assert pair.run(on_rank.settings).values() == fresh
    assert fresh[0] == {
        "dtype": "torch.float32",
        "grad": True,
        "threads": 1,
        "deterministic": False,
        "device": "cpu",
        "folder": str(Path.cwd()),
        "OMP_NUM_THREADS": "1",
    }


def test_a_job_that_destroys_the_group_costs_its_processes_only(pair: Pool) -> None:
    before = pair.pids
    assert pair.run(on_rank.destroys_the_group).kind == "ok"
    assert pair.run(on_rank.total, 0.0).kind == "ok"
    assert not set(before) & set(pair.pids)


def test_ranks_ignore_ctrl_c(pair: Pool) -> None:
    assert pair.run(on_rank.signal_handlers).values() == [True, True]


def test_what_ranks_print_is_not_in_the_parents_output(capfd: pytest.CaptureFixture[str]) -> None:
    with Pool(2) as pool:
        pool.run(on_rank.prints)
    assert "by a rank" not in capfd.readouterr().out


# --- jobs that raise


def test_an_exception_while_others_wait(pair: Pool) -> None:
    outcome = pair.run(on_rank.raises_on_rank_1, "value")
    assert outcome.kind == "error"
    error = raised(outcome, 1)
    assert (error.type_name, error.message) == ("ValueError", "the shape is wrong")
    assert error.traceback.splitlines()[1].endswith("in raises_on_rank_1"), "our own frames are left out"
    waiting = outcome.ranks[0]
    assert isinstance(waiting, Blocked)
    assert "all_reduce" in (waiting.last_collective or "")
    assert outcome.seconds < pair.deadline / 2
    with pytest.raises(NotOk, match="the shape is wrong"):
        outcome.values()


def test_exceptions_on_every_rank_are_all_reported(pools: Pools) -> None:
    outcome = pools.get(3).run(on_rank.all_raise)
    assert [raised(outcome, rank).message for rank in range(3)] == ["rank 0", "rank 1", "rank 2"]


@pytest.mark.parametrize(
    ("kind", "type_name", "message"),
    [
        ("exit", "SystemExit", "enough"),
        ("interrupt", "KeyboardInterrupt", ""),
        ("unprintable", "rank_functions._Unprintable", "(its message raises TypeError)"),
    ],
)
def test_nothing_that_is_raised_gets_lost(pair: Pool, kind: str, type_name: str, message: str) -> None:
    error = raised(pair.run(on_rank.raises_on_rank_1, kind), 1)
    assert (error.type_name, error.message) == (type_name, message)


def test_a_result_that_cannot_be_pickled(pair: Pool) -> None:
    outcome = pair.run(on_rank.unpicklable)
    assert "the result of rank_functions:unpicklable, a function, cannot be pickled" in raised(outcome, 0).message
    assert isinstance(outcome.ranks[1], Returned)


def test_a_result_that_cannot_be_read_back(pair: Pool) -> None:
    assert "cannot be read back: ValueError: cannot be made here" in raised(pair.run(on_rank.unreadable), 0).message


@pytest.mark.parametrize(
    ("function", "type_name"),
    [("no_such_module_at_all:f", "ModuleNotFoundError"), ("rank_functions:no_such", "AttributeError")],
)
def test_a_function_that_is_not_there(pair: Pool, function: str, type_name: str) -> None:
    assert raised(pair.run(function), 0).type_name == type_name


def test_a_function_that_ranks_could_never_import(pair: Pool) -> None:
    with pytest.raises(ValueError, match="ranks cannot import"):
        pair.start(lambda context: 1)
    with pytest.raises(ValueError, match="expected module:name"):
        pair.start("nothing")
    assert pair.run(on_rank.who).kind == "ok", "a refused job does no harm"


def test_ranks_cannot_start_ranks(pair: Pool) -> None:
    error = raised(pair.run(on_rank.pools_within), 0)
    assert "what runs on a rank cannot start ranks itself" in error.message


# --- jobs that die


@pytest.mark.parametrize(
    ("how", "code", "description"),
    [
        ("exit", 7, "exited with code 7 without returning"),
        ("SIGKILL", -9, "killed by SIGKILL"),
        ("SIGSEGV", -11, "killed by SIGSEGV"),
        ("SIGTERM", -15, "killed by SIGTERM"),
    ],
)
def test_a_death(pair: Pool, how: str, code: int, description: str) -> None:
    outcome = pair.run(on_rank.dies_on_rank_1, how)
    assert outcome.kind == "crash"
    assert outcome.ranks[1] == Died(code, description)
    assert not isinstance(outcome.ranks[0], Returned | Died), "its partner waits, or sees the connection break"
    assert outcome.seconds < pair.deadline / 2


def test_a_death_between_jobs_is_seen_by_the_next(pair: Pool) -> None:
    assert pair.run(on_rank.total, 0.0, label="the culprit").kind == "ok"
    os.kill(pair.pids[0], signal.SIGKILL)
    outcome = pair.run(on_rank.total, 0.0)
    assert outcome.ranks[0] == Died(-9, "killed by SIGKILL")
    assert outcome.history[-1] == "the culprit"
    assert pair.run(on_rank.total, 0.0).kind == "ok"


def test_after_every_bad_end_the_next_job_has_fresh_processes(pair: Pool) -> None:
    for function, argument in [(on_rank.raises_on_rank_1, "value"), (on_rank.dies_on_rank_1, "exit")]:
        before = pair.pids
        pair.run(function, argument)
        outcome = pair.run(on_rank.total, 1.0)
        assert outcome.kind == "ok"
        assert outcome.history == ()
        assert not set(before) & set(pair.pids)
        assert not any(Path(f"/proc/{pid}").exists() for pid in before), "the old ones are gone and reaped"


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


def test_ranks_that_cannot_start_are_no_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path)
    monkeypatch.setattr("harness.world.crew._make_store", lambda: (os.open(os.devnull, os.O_RDWR), folder))
    monkeypatch.setattr("harness.world.pool.START_TIMEOUT", 10.0)
    with Pool(1) as pool, pytest.raises(WorldError, match=r"rank 0 of 1 could not start|did not start within"):
        pool.run(on_rank.who)


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
