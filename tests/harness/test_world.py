"""harness.world: jobs that end well, and the same start for every one of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_functions as on_rank
import torch

from harness.world import Pool, Pools

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with Pools(preload=["rank_functions"]) as pools:
        yield pools


@pytest.fixture
def pair(pools: Pools) -> Pool:
    return pools.get(2)


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


def test_ranks_do_not_all_say_what_is_deprecated(capfd: pytest.CaptureFixture[str]) -> None:
    with Pool(2) as pool:
        assert pool.run(on_rank.gathers).kind == "ok"
    assert "deprecated" not in "".join(capfd.readouterr())


def test_what_ranks_print_is_not_in_the_parents_output(capfd: pytest.CaptureFixture[str]) -> None:
    with Pool(2) as pool:
        pool.run(on_rank.prints)
    assert "by a rank" not in capfd.readouterr().out
