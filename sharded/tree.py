"""All-reduce along a binomial tree: reduced towards rank 0, then handed out from there, in 2 log2(n) steps.

Few messages, and whole tensors in each: a rank with k children receives and sends k S and, but for the root, S more.
The root has about log2(n) children, so its link carries more the more ranks there are.
"""

from __future__ import annotations

import torch

from sharded.reductions import combine, finish
from sharded.schedule import Exchange, Job, Schedule


def all_reduce(job: Job) -> Schedule:
    """Leaves the reduced values in all of ``job.result``."""
    below = children(job.rank, job.size)
    for child in below:
        came = torch.empty_like(job.total)
        yield Exchange(receives=((child, came),))
        combine(job.total, came, job.reduction)
    if job.rank == 0:
        finish(job.total, job.result, job.reduction, job.size)
    else:
        above = job.rank & (job.rank - 1)  # without the lowest bit
        yield Exchange(sends=((above, job.total),))
        yield Exchange(receives=((above, job.result),))
    for child in reversed(below):
        yield Exchange(sends=((child, job.result),))


def children(rank: int, size: int) -> list[int]:
    """The ranks that hand their values to this one, the nearest first."""
    found, distance = [], 1
    while rank + distance < size and not rank & distance:
        found.append(rank + distance)
        distance *= 2
    return found
