"""All-reduce by recursive halving and doubling: as few bytes as a ring where n is a power of two, in 2 log2(n) steps.

Partners at distance p/2, p/4, ... 1 exchange the halves that the other keeps, until each of p ranks has reduced one
piece; the same way back, they exchange what they have. p is the largest power of two that is not above n. The n - p
ranks beyond hand their whole tensor to a neighbour first and get the result at the end (Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", 2005): those pairs move 2 S more.
"""

from __future__ import annotations

import torch

from sharded.reductions import combine, finish
from sharded.schedule import Exchange, Job, Schedule


def all_reduce(job: Job) -> Schedule:
    """Leaves the reduced values in all of ``job.result``."""
    core = 1 << (job.size.bit_length() - 1)
    extra = job.size - core
    paired = job.rank < 2 * extra
    if paired and job.rank % 2:
        yield Exchange(sends=((job.rank - 1, job.total),))
        yield Exchange(receives=((job.rank - 1, job.result),))
        return
    if paired:
        came = torch.empty_like(job.total)
        yield Exchange(receives=((job.rank + 1, came),))
        combine(job.total, came, job.reduction)
    yield from _among(job, core, extra)
    if paired:
        yield Exchange(sends=((job.rank + 1, job.result),))


def _among(job: Job, core: int, extra: int) -> Schedule:
    """Of the ``core`` ranks that are left, a power of two."""
    here = job.rank // 2 if job.rank < 2 * extra else job.rank - extra
    start, end = 0, job.total.numel()
    kept: list[tuple[int, int, int]] = []  # the partner, and the range that both had
    distance = core // 2
    while distance:
        partner, middle = here ^ distance, start + (end - start + 1) // 2
        rank = 2 * partner if partner < extra else partner + extra
        kept.append((rank, start, end))
        mine, theirs = (start, middle), (middle, end)
        if here & distance:
            mine, theirs = theirs, mine
        into = job.total[slice(*mine)]
        came = torch.empty_like(into)
        yield Exchange(sends=((rank, job.total[slice(*theirs)]),), receives=((rank, came),))
        combine(into, came, job.reduction)
        start, end = mine
        distance //= 2
    finish(job.total[start:end], job.result[start:end], job.reduction, job.size)
    for rank, lower, upper in reversed(kept):
        other = slice(end, upper) if start == lower else slice(lower, start)
        yield Exchange(sends=((rank, job.result[start:end]),), receives=((rank, job.result[other]),))
        start, end = lower, upper
