"""harness.world: telling ranks that wait for ever from ranks that work, and saying where they wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_functions as on_rank

from harness.world import Blocked, Outcome, Pool, Returned
from harness.world.stacks import NO_STACK, trimmed
from harness.world.watch import CAN_WATCH, Stillness

LONG = 120.0  # a deadline that no test here waits for
linux_only = pytest.mark.skipif(not CAN_WATCH, reason="only Linux tells what a process does")


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    with Pool(2, deadline=LONG, quiet=1.0, preload=["rank_functions"]) as pool:
        yield pool


@pytest.fixture
def loaded_machine() -> Iterator[None]:
    """More work than cores, so that ranks get little time."""
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)]
    try:
        yield
    finally:
        for process in spin:
            process.kill()
            process.wait()


def blocked(outcome: Outcome, rank: int) -> Blocked:
    ending = outcome.ranks[rank]
    assert isinstance(ending, Blocked), f"rank {rank} is not blocked: {outcome}"
    return ending


@linux_only
def test_a_deadlock_costs_seconds_and_says_where(pair: Pool) -> None:
    outcome = pair.run(on_rank.collective_on_rank_0_only)
    assert outcome.kind == "hang"
    assert outcome.seconds < LONG / 4
    stuck = blocked(outcome, 0)
    assert stuck.last_collective == "all_reduce on group [0, 1], float64, 12 elements, 2nd collective of this rank"
    assert "in all_reduce" in stuck.stack
    assert stuck.stack.splitlines()[-1].endswith("in collective_on_rank_0_only"), "our own frames are left out"
    assert "harness/world" not in stuck.stack
    assert isinstance(outcome.ranks[1], Returned)
    assert pair.run(on_rank.total, 0.0).kind == "ok", "and it goes on"


@linux_only
def test_a_deadlock_in_backward(pair: Pool) -> None:
    stuck = blocked(pair.run(on_rank.deadlock_in_backward), 1)
    assert stuck.last_collective == "all_reduce on group [0, 1], float32, 2 elements, 1st collective of this rank"
    assert "in backward" in stuck.stack


@linux_only
def test_waiting_for_a_group_that_others_do_not_make(pair: Pool) -> None:
    """Polling a store is no work either."""
    outcome = pair.run(on_rank.waits_in_new_group)
    assert outcome.kind == "hang"
    assert outcome.seconds < LONG / 4


def test_a_busy_rank_has_until_the_deadline(pair: Pool) -> None:
    outcome = pair.run(on_rank.spins_on_rank_0, deadline=2.0)
    assert outcome.kind == "hang"
    assert outcome.seconds >= 2.0
    assert "in spins_on_rank_0" in blocked(outcome, 0).stack, "a rank that holds the interpreter has a stack too"
    assert blocked(outcome, 0).last_collective is None


@pytest.mark.parametrize(
    "function", [on_rank.works_in_bursts, on_rank.waits_for_a_busy_child, on_rank.waits_for_a_busy_thread]
)
def test_work_is_not_stillness(pair: Pool, function: object) -> None:
    assert pair.run(function, 1.8).values() == ["done", "done"]  # type: ignore[arg-type]


def test_opening_groups_is_not_stillness(pair: Pool) -> None:
    """Without a collective, each well within the window, and all of them together beyond it."""
    assert pair.run(on_rank.opens_groups, 6, 0.5).values() == ["done", "done"]


@pytest.mark.usefixtures("loaded_machine")
def test_starved_ranks_are_not_still(pair: Pool) -> None:
    """Each rank gets a small part of a core, and most of the time waits for it."""
    assert pair.run(on_rank.waits_for_a_busy_child, 2.0).kind == "ok"
    assert pair.run(on_rank.works_in_bursts, 2.0).kind == "ok"


@linux_only
def test_sleep_is_stillness() -> None:
    """The other side: the watch is what ends this job, and a longer one lets it finish."""
    with Pool(1, deadline=LONG, quiet=0.5) as pool:
        assert pool.run(on_rank.sleeps, 60.0).kind == "hang"
    with Pool(1, deadline=LONG, quiet=30.0) as pool:
        assert pool.run(on_rank.sleeps, 1.5).kind == "ok"


@linux_only
def test_progress_and_other_processes_begin_the_window_anew() -> None:
    code = "import time; print(flush=True); time.sleep(600)"
    sleeper = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert sleeper.stdout is not None
        sleeper.stdout.readline()
        while Path(f"/proc/{sleeper.pid}/stat").read_text().split()[2] != "S":
            time.sleep(0.01)
        # From here on the times are made up, and only what the process does is real.
        watch = Stillness(1.0)
        for step in range(100):
            if watch.sample(step * 0.05, [sleeper.pid], progress=step // 10):
                pytest.fail("something happens in every half of the window")
        still = [watch.sample(5.0 + step * 0.05, [sleeper.pid], progress="none") for step in range(30)]
        assert not any(still[:20])
        assert still[-1]
        assert not watch.sample(6.5, [sleeper.pid, sleeper.pid], progress="none")
    finally:
        sleeper.kill()
        sleeper.wait()


@linux_only
def test_a_process_that_comes_or_goes_begins_the_window_anew() -> None:
    """One that worked until now is gone from what is looked at, and whoever waited for it has not worked yet."""
    code = "echo; read line; sleep 600 & echo $!; wait; echo; read line"
    parent = subprocess.Popen(["sh", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert parent.stdin is not None
    assert parent.stdout is not None

    def still(begin: float) -> list[bool]:
        assert parent.stdout is not None
        said.append(parent.stdout.readline())
        time.sleep(0.5)  # for all to sleep again
        return [watch.sample(begin + step * 0.05, [parent.pid], progress=None) for step in range(30)]

    said: list[bytes] = []
    watch = Stillness(1.0)
    try:
        assert still(0.0)[-1]
        parent.stdin.write(b"\n")
        came = still(1.5)
        os.kill(int(said[-1]), signal.SIGKILL)
        went = still(3.0)
        assert not any(came[:20] + went[:20])
        assert came[-1]
        assert went[-1]
    finally:
        parent.kill()
        parent.communicate()


@linux_only
def test_a_starved_watcher_decides_nothing() -> None:
    watch = Stillness(1.0)
    assert not any(watch.sample(step * 0.9, [1], progress=None) for step in range(9))


def test_stacks_are_trimmed() -> None:
    text = """Thread 0x01 (most recent call first):
  File "/lib/threading.py", line 3 in wait

Current thread 0x02 (most recent call first):
  File "/site/torch/distributed.py", line 9 in all_reduce
  File "/x/harness/world/traffic.py", line 9 in __torch_dispatch__
  File "/user/layer.py", line 2 in forward
  File "/x/harness/world/worker.py", line 8 in _run
  File "<string>", line 1 in <module>
"""
    assert trimmed(text) == (
        'Thread 0x01 (most recent call first):\n  File "/lib/threading.py", line 3 in wait\n\n'
        'Current thread 0x02 (most recent call first):\n  File "/site/torch/distributed.py", line 9 in all_reduce\n'
        '  File "/user/layer.py", line 2 in forward'
    )
    assert trimmed("") == NO_STACK
