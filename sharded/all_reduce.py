"""Reductions made of point-to-point sends: what gradients are summed with.

    total = all_reduce(x, group)                                  # a new tensor; or into x with in_place=True
    totals = all_reduce_buckets([a, b], group, reduction="avg")   # several in flight
    handle = start_all_reduce(x, group); ...; total = handle.wait()

| algorithm | most bytes that one rank sends, of S | steps |
|---|---|---|
| ring | 2 (n - 1)/n S | 2 (n - 1) |
| halving_doubling | the same where n is a power of two, else up to S more | 2 log2(n) |
| tree | log2(n) S, at the root | 2 log2(n) |
| parameter_server | (n - 1) S, at the server, and it receives as many | 2 (n - 1) at the server |

Every element is reduced on one rank and copied from there: all ranks end with the same bits, whatever the algorithm.
Two algorithms add in different orders, so they may differ in the last bits.

Precision: partial results are kept and travel in the tensor's dtype, each addition rounded to it. With
``accumulate_fp32`` those of bf16 and fp16 are kept and travel in fp32, twice the bytes; the finished values are rounded
to the tensor's dtype once, and travel in that. A mean divides the finished sum once, before that rounding. A NaN on any
rank gives NaN, maximum and minimum too (gloo's own all-reduce may lose it).

Agreement: by default every call starts with an all-gather of `agreement.ROW` whole numbers a rank, so that tensors of
different lengths, dtypes or order, or different arguments, are refused on every rank by a ValueError that says which
rank asks for what. check=False saves that; then such a call hangs or returns garbage.

No function here is differentiable: results have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.distributed import ProcessGroup

from sharded import halving_doubling, parameter_server, ring, tree
from sharded.agreement import Agreement, Request, require
from sharded.cut import piece
from sharded.point_to_point import Handle, end_all, together
from sharded.reductions import accumulation_dtype
from sharded.schedule import Algorithm, Job, Schedule

_ALGORITHMS: Mapping[str, Algorithm] = {
    "ring": ring.all_reduce,
    "halving_doubling": halving_doubling.all_reduce,
    "tree": tree.all_reduce,
    "parameter_server": parameter_server.all_reduce,
}


def all_reduce(
    x: torch.Tensor,
    group: ProcessGroup,
    *,
    reduction: str = "sum",
    algorithm: str = "ring",
    accumulate_fp32: bool = False,
    in_place: bool = False,
    check: bool = True,
) -> torch.Tensor:
    """The sum, mean ("avg"), maximum or minimum over the group of x, of any shape and strides, in x's shape and dtype.

    in_place: into x, which is returned; else a new contiguous tensor.

    Raises ValueError as said above, and where this rank is not in the group.
    """
    start = start_all_reduce(
        x,
        group,
        reduction=reduction,
        algorithm=algorithm,
        accumulate_fp32=accumulate_fp32,
        in_place=in_place,
        check=check,
    )
    return start.wait()


def start_all_reduce(
    x: torch.Tensor,
    group: ProcessGroup,
    *,
    reduction: str = "sum",
    algorithm: str = "ring",
    accumulate_fp32: bool = False,
    in_place: bool = False,
    check: bool = True,
) -> Handle:
    """Begins an all-reduce: ``wait()`` of the handle returns what `all_reduce` does, and raises what it raises.

    x may be changed as soon as this returns, unless in_place. Every rank must begin as many as the others: one that a
    rank does not begin is waited for in vain.
    """
    require_member(group)
    request = _request("all_reduce", [x], algorithm, reduction, accumulate_fp32)
    agreement = _agreement(request, group, [x], check)
    return _begin(x, group, request, in_place, agreement)


def all_reduce_buckets(
    tensors: Sequence[torch.Tensor],
    group: ProcessGroup,
    *,
    reduction: str = "sum",
    algorithm: str = "ring",
    accumulate_fp32: bool = False,
    in_place: bool = False,
    check: bool = True,
) -> list[torch.Tensor]:
    """All-reduces several tensors, all in flight at a time; one check for all of them. As `all_reduce` else."""
    require_member(group)
    request = _request("all_reduce", tensors, algorithm, reduction, accumulate_fp32)
    end_all(group)  # the check waits for the other ranks, who may be waiting for what this rank has begun
    agreement = _agreement(request, group, tensors, check)
    if agreement is not None:
        agreement.settle()
    return together([_begin(x, group, request, in_place, None) for x in tensors], group)


def reduce_scatter(
    x: torch.Tensor,
    group: ProcessGroup,
    *,
    reduction: str = "sum",
    accumulate_fp32: bool = False,
    check: bool = True,
) -> torch.Tensor:
    """This rank's piece of the reduced x, which is looked at as one row of numbers: [length of the piece].

    Pieces are balanced: the first length % n are one longer. By a ring: a rank sends S - |piece r| bytes.

    Raises ValueError as `all_reduce`.
    """
    require_member(group)
    request = _request("reduce_scatter", [x], "ring", reduction, accumulate_fp32)
    agreement = _agreement(request, group, [x], check)
    job = _job(_own(x) if request.problem() == 0 else torch.empty(0), group, request)
    offset, length = piece(job.result.numel(), job.size, job.rank)
    deliver: Callable[[], torch.Tensor] = lambda: job.result[offset : offset + length].clone()  # noqa: E731
    return Handle(ring.reduce_scatter(job), deliver, group, agreement).wait()


def all_gather(x: torch.Tensor, group: ProcessGroup, length: int | None = None, *, check: bool = True) -> torch.Tensor:
    """The ranks' pieces, each one row of numbers, joined: [length]. By a ring: a rank sends S - |piece r + 1| bytes.

    length: of the whole; without it all pieces must be as long as x. Raises ValueError as `all_reduce`, and where x is
    not this rank's balanced piece of ``length``.
    """
    require_member(group)
    whole_length = x.numel() * group.size() if length is None else length
    offset, due = piece(max(whole_length, 0), group.size(), group.rank())
    short = x.numel() != due or whole_length < 0
    request = Request("all_gather", "ring", "sum", False, ((whole_length,),), (x.dtype,), short=short)
    agreement = _agreement(request, group, [x], check)
    whole = x.new_empty(0 if short else whole_length)
    if not short:
        whole[offset : offset + due] = x.detach().reshape(-1)
    return Handle(ring.all_gather(whole, group.rank(), group.size()), lambda: whole, group, agreement).wait()


def require_member(group: ProcessGroup) -> None:
    """Raises ValueError where this rank is not in the group: torch.distributed.new_group then gives no group."""
    if not isinstance(group, ProcessGroup) or group.rank() < 0:
        raise ValueError(
            f"this rank is not in the group that it was given ({group!r}): call it on the group's ranks only"
        )


def _request(operation: str, tensors: Sequence[torch.Tensor], algorithm: str, reduction: str, fp32: bool) -> Request:
    dense = all(isinstance(x, torch.Tensor) and x.layout == torch.strided for x in tensors)
    shapes = tuple(tuple(x.shape) for x in tensors) if dense else ()
    dtypes = tuple(x.dtype for x in tensors) if dense else ()
    return Request(operation, algorithm, reduction, bool(fp32), shapes, dtypes, dense)


def _agreement(request: Request, group: ProcessGroup, tensors: Sequence[torch.Tensor], check: bool) -> Agreement | None:
    if not check or group.size() == 1:
        require(request)
        return None
    # What this rank alone knows to be wrong, the others must hear of: they wait for it.
    device = tensors[0].device if tensors and request.dense else torch.device("cpu")
    return Agreement(request, group, device)


def _begin(
    x: torch.Tensor, group: ProcessGroup, request: Request, in_place: bool, agreement: Agreement | None
) -> Handle:
    if request.problem():  # which the agreement is about to say on all ranks
        return Handle(_nothing(), lambda: x, group, agreement)
    shares = in_place and x.is_contiguous()
    job = _job(x.detach().view(-1) if shares else _own(x), group, request)

    def delivered() -> torch.Tensor:
        return deliver(x, job.result, in_place)

    return Handle(_ALGORITHMS[request.algorithm](job), delivered, group, agreement)


def deliver(x: torch.Tensor, result: torch.Tensor, in_place: bool) -> torch.Tensor:
    """The result, [length], in the shape of x, or in x itself, whose strides may be any."""
    shaped = result.view(x.shape)
    if not in_place:
        return shaped
    if not x.is_contiguous():
        x.detach().copy_(shaped)
    return x


def _job(values: torch.Tensor, group: ProcessGroup, request: Request) -> Job:
    """values: [length], which may be overwritten."""
    kept = accumulation_dtype(values.dtype, request.reduction, request.fp32)
    return Job(values.to(kept), values, group.rank(), group.size(), request.reduction)


def _own(x: torch.Tensor) -> torch.Tensor:
    """The values of x as one row of numbers in memory of its own."""
    return x.detach().clone(memory_format=torch.contiguous_format).view(-1)


def _nothing() -> Schedule:
    yield from ()
