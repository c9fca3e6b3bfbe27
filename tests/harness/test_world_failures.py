"""harness.world: jobs that raise and jobs that die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_functions as on_rank

from harness.world import Blocked, Died, NotOk, Outcome, Pool, Pools, Raised, Returned


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


@pytest.mark.parametrize(("ending", "kind"), [("hang", "hang"), ("raise", "error"), ("die", "crash")])
def test_what_ranks_told_outlives_them(pair: Pool, ending: str, kind: str) -> None:
    outcome = pair.run(on_rank.tells, ending)
    assert (outcome.kind, outcome.told) == (kind, ("rank 0 is here", "rank 1 is here"))


def test_what_ranks_told_is_their_jobs(pair: Pool) -> None:
    assert pair.run(on_rank.total, 0.0).told == (), "nobody asks where nothing is wrong"
    assert pair.run(on_rank.tells, "silence").told == ("rank 0 is here", None)
    assert pair.run(on_rank.raises_on_rank_1, "value").told == (None, None)


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
    last = "all_reduce on group [0, 1], float32, 3 elements, 1st collective of this rank"
    assert outcome.ranks[1] == Died(code, description, last)
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


# --- what others say in a rank's name


@pytest.mark.parametrize("how", ["return", "raise"])
def test_a_forked_child_that_comes_back_does_not_answer_for_its_rank(pair: Pool, how: str) -> None:
    late = 0.5
    assert pair.run(on_rank.forks_a_child_that_comes_back, late, how).values() == ["the rank's"] * 2
    pids = pair.pids
    assert pair.run(on_rank.sleeps, 3 * late).values() == ["done"] * 2, "nor does it answer a later job"
    assert pair.run(on_rank.who).values() == [(rank, 2, pid) for rank, pid in enumerate(pids)], "nor take one"


def test_a_forked_child_ends_as_a_program_of_its_own_would(pair: Pool) -> None:
    assert pair.run(on_rank.how_its_children_ended).values() == [[0, 0, 3, 1, 1]] * 2


def test_an_answer_to_another_job_is_none(pair: Pool) -> None:
    for number in (-1, pair.start(on_rank.who).job.number):
        assert pair.run(on_rank.answers_another_job, number).values() == ["its own"] * 2
        assert pair.run(on_rank.echo, "the next").values() == ["the next"] * 2
