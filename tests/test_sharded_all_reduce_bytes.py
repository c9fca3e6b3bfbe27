"""Every algorithm, for every number of ranks up to 16 and every length up to 64: values, equal bits, exact bytes.

The same schedules as on ranks, over a wire in this process. test_sharded_all_reduce.py has the real ones.
"""

from __future__ import annotations

import pytest
import torch
from simulated_wire import run

from reference.all_reduce_traffic import elements
from sharded import halving_doubling, mutants, parameter_server, ring, tree
from sharded.schedule import Job

ALGORITHMS = {
    "ring": ring.all_reduce,
    "halving_doubling": halving_doubling.all_reduce,
    "tree": tree.all_reduce,
    "parameter_server": parameter_server.all_reduce,
}
LENGTHS = range(65)


def jobs(n: int, length: int, reduction: str, kept: torch.dtype, dtype: torch.dtype) -> list[Job]:
    """Of every rank: whole numbers that differ from rank to rank and from place to place."""
    made = []
    for rank in range(n):
        total = ((torch.arange(length) * 5 + rank * 7) % 11 - 5).to(kept)
        result = total if kept == dtype else torch.full((length,), torch.nan, dtype=dtype)
        made.append(Job(total, result, rank, n, reduction))
    return made


def wanted(given: list[torch.Tensor], reduction: str) -> torch.Tensor:
    stacked = torch.stack(given)
    return {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0), "avg": stacked.mean(0)}[reduction]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("n", range(1, 17))
def test_bytes_and_values_for_all_lengths(algorithm: str, n: int) -> None:
    for length in LENGTHS:
        kept = torch.float64 if length % 2 else torch.float32
        all_jobs = jobs(n, length, "sum", kept, torch.float32)
        want = wanted([job.total.double() for job in all_jobs], "sum")
        wire = run([ALGORITHMS[algorithm](job) for job in all_jobs])
        for job, (sums, finished) in zip(all_jobs, elements(algorithm, length, n), strict=True):
            assert torch.equal(job.result.double(), want), (length, job.rank)
            due = sums.times(kept.itemsize) + finished.times(4)
            assert (wire.sent(job.rank), wire.received(job.rank)) == (due.sent, due.received), (length, job.rank)


@pytest.mark.parametrize("n", range(2, 17))
def test_the_ring_stays_under_two_s_and_the_server_grows_with_n(n: int) -> None:
    for length in LENGTHS:
        size = 4 * length
        around = run([ring.all_reduce(job) for job in jobs(n, length, "sum", torch.float32, torch.float32)])
        for rank in range(n):
            assert around.sent(rank) <= 2 * size
            assert around.received(rank) <= 2 * size
            assert around.sent(rank) < 2 * size or length < n
            if length % n == 0:
                assert around.sent(rank) * n == 2 * (n - 1) * size
        server = run([parameter_server.all_reduce(job) for job in jobs(n, length, "sum", torch.float32, torch.float32)])
        assert server.sent(0) + server.received(0) == 2 * (n - 1) * size
        assert all(server.sent(rank) + server.received(rank) == 2 * size for rank in range(1, n))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("reduction", ["avg", "max", "min"])
def test_the_other_reductions(algorithm: str, reduction: str) -> None:
    for n in (1, 2, 3, 4, 7, 8):
        all_jobs = jobs(n, 13, reduction, torch.float64, torch.float64)
        want = wanted([job.total.clone() for job in all_jobs], reduction)
        run([ALGORITHMS[algorithm](job) for job in all_jobs])
        for job in all_jobs:
            assert torch.equal(job.result, all_jobs[0].result)
            # A mean is one division of an exact sum on both sides.
            assert torch.equal(job.result, want)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_floats_end_with_the_same_bits(algorithm: str) -> None:
    for n in range(1, 17):
        stream = torch.Generator().manual_seed(n)
        all_jobs = []
        for rank in range(n):
            total = torch.randn(29, generator=stream).to(torch.bfloat16)
            all_jobs.append(Job(total, total, rank, n, "sum"))
        run([ALGORITHMS[algorithm](job) for job in all_jobs])
        assert all(torch.equal(job.result, all_jobs[0].result) for job in all_jobs)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("reduction", ["sum", "avg", "max", "min"])
def test_a_nan_of_any_rank_stays_one(algorithm: str, reduction: str) -> None:
    for n in (2, 3, 5):
        for where in range(n):
            all_jobs = jobs(n, 6, reduction, torch.float32, torch.float32)
            all_jobs[where].total[4] = torch.nan
            run([ALGORITHMS[algorithm](job) for job in all_jobs])
            for job in all_jobs:
                assert job.result.isnan().tolist() == [False] * 4 + [True, False], (n, where)


def test_the_parts_of_a_ring_on_their_own() -> None:
    for n in range(1, 17):
        for length in (0, 1, n - 1, n, 3 * n + 2):
            all_jobs = jobs(n, length, "sum", torch.float32, torch.float32)
            want = wanted([job.total.clone() for job in all_jobs], "sum")
            scattered = run([ring.reduce_scatter(job) for job in all_jobs])
            parts = elements("ring", length, n)
            for job in all_jobs:
                assert torch.equal(ring.pieces(job.result, n)[job.rank], ring.pieces(want, n)[job.rank])
                assert scattered.sent(job.rank) == 4 * parts[job.rank][0].sent
            gathered = run([ring.all_gather(job.result, job.rank, n) for job in all_jobs])
            for job in all_jobs:
                assert torch.equal(job.result, want)
                assert gathered.received(job.rank) == 4 * parts[job.rank][1].received


def test_a_tail_that_is_not_reduced_shows_where_n_does_not_divide_the_length() -> None:
    with mutants.applied("F52"):
        for n, length, right in ((2, 4, True), (2, 5, False), (3, 2, False), (4, 64, True), (4, 63, False)):
            all_jobs = jobs(n, length, "sum", torch.float32, torch.float32)
            want = wanted([job.total.clone() for job in all_jobs], "sum")
            run([ring.all_reduce(job) for job in all_jobs])
            assert all(torch.equal(job.result, want) for job in all_jobs) == right, (n, length)


def test_a_wire_does_not_hang() -> None:
    def only_receives() -> ring.Schedule:
        yield ring.Exchange(receives=((1, torch.empty(1)),))

    def nothing() -> ring.Schedule:
        yield from ()

    with pytest.raises(RuntimeError, match=r"ranks \[0\] wait for each other"):
        run([only_receives(), nothing()])
