"""Ring all-reduce: a reduce-scatter and an all-gather, in each of which every rank sends to its successor alone.

The tensor, S bytes, is cut into n pieces in balance. In n - 1 steps the pieces go round and are added to, until rank r
has all of piece r; in n - 1 more the finished pieces go round. Rank r sends 2 S - |piece r| - |piece r + 1|, so
2 (n - 1)/n S where n divides the length, and never more than 2 S, however many ranks there are (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). Each element is reduced on one rank and
copied from there: all ranks end with the same bits.
"""

from __future__ import annotations

import torch

from sharded.reductions import combine, finish
from sharded.schedule import Exchange, Job, Schedule, pieces


def all_reduce(job: Job) -> Schedule:
    """Leaves the reduced values in all of ``job.result``."""
    yield from reduce_scatter(job)
    yield from all_gather(job.result, job.rank, job.size)


def reduce_scatter(job: Job) -> Schedule:
    """Leaves the reduced values in this rank's piece of ``job.result``."""
    own, n = pieces(job.total, job.size), job.size
    for step in range(1, n):
        # Piece r - 1 leaves first, so that the last to come in is the rank's own.
        into = own[(job.rank - step - 1) % n]
        came = torch.empty_like(into)
        out = own[(job.rank - step) % n]
        yield Exchange(sends=(((job.rank + 1) % n, out),), receives=(((job.rank - 1) % n, came),))
        combine(into, came, job.reduction)
    finish(own[job.rank], pieces(job.result, n)[job.rank], job.reduction, n)


def all_gather(x: torch.Tensor, rank: int, size: int) -> Schedule:
    """Fills x, [length], of which every rank has its own piece."""
    own = pieces(x, size)
    for step in range(size - 1):
        out, into = own[(rank - step) % size], own[(rank - step - 1) % size]
        yield Exchange(sends=(((rank + 1) % size, out),), receives=(((rank - 1) % size, into),))
