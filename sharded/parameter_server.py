"""The parameter server: every rank pushes its tensor to one, which reduces them, and pulls the result from it.

The design that ring reductions replaced: n - 1 pushes and as many pulls go over the server's link, 2 (n - 1) S bytes,
while each of the others moves 2 S (Li and others, "Scaling distributed machine learning with the parameter server",
2014).
Rank 0 of the group is the server, and one of those that have values of their own.
"""

from __future__ import annotations

import torch

from sharded.reductions import combine, finish
from sharded.schedule import Exchange, Job, Schedule

SERVER = 0


def all_reduce(job: Job) -> Schedule:
    """Leaves the reduced values in all of ``job.result``."""
    if job.rank != SERVER:
        yield Exchange(sends=((SERVER, job.total),))
        yield Exchange(receives=((SERVER, job.result),))
        return
    workers = range(1, job.size)
    came = torch.empty_like(job.total)  # one at a time: the server needs no memory for n tensors
    for worker in workers:
        yield Exchange(receives=((worker, came),))
        combine(job.total, came, job.reduction)
    finish(job.total, job.result, job.reduction, job.size)
    yield Exchange(sends=tuple((worker, job.result) for worker in workers))
