"""Slices in another order along a dimension: swapped, interleaved, or joined along the wrong dimension."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from harness.oracle.compare import different
from harness.oracle.patterns.evidence import Evidence, Values
from harness.oracle.patterns.fit import Explanation, beyond, fit
from harness.oracle.patterns.wording import numbers, of_ranks, on_ranks
from reference.layout import cut

Order = NDArray[np.int64]

#: Slices of a dimension that are compared pair by pair.
_MOST_SLICES = 512


def joined_along_the_wrong_dimension(evidence: Evidence) -> str | None:
    """The ranks' pieces of one dimension laid one after the other and viewed as the whole: what an all-gather along
    the first dimension gives where one along another is due."""
    axes = [(name, size) for name, size in evidence.mesh.axes if size > 1]
    dims = max((want.ndim for want in evidence.wants), default=0)
    for name, size in axes:
        for dim in range(1, dims):
            explained = tuple(_laid_end_to_end(want, dim, size) for want in evidence.wants)
            limits = evidence.limits
            allowed = None if limits is None else tuple(_laid_end_to_end(limit, dim, size) for limit in limits)
            found = fit(evidence, Explanation(explained, allowed))
            if found is not None and found.sure(evidence, len(axes) * dims):
                last = " (the last)" if dim == evidence.wants[found.ranks[0]].ndim - 1 else ""
                return (
                    f"{of_ranks(evidence, found.ranks)} has the pieces of dimension {dim}{last} of {name} one after "
                    f"the other in memory: gathered along the first dimension and viewed, where a gather along "
                    f"dimension {dim} is due"
                )
    return None


def _laid_end_to_end(want: Values, dim: int, size: int) -> Values:
    """[..., L, ...] as the pieces of L in memory order, viewed as [..., L, ...]; uneven pieces padded with zeros to the
    longest, as they travel."""
    if want.ndim <= dim or not want.size:
        return want
    lengths = cut(want.shape[dim], size)
    pieces, start = [], 0
    for length in lengths:
        piece = want.take(range(start, start + length), axis=dim)
        padding = [(0, lengths[0] - length if d == dim else 0) for d in range(want.ndim)]
        pieces.append(np.pad(piece, padding).ravel())
        start += length
    shape = (*want.shape[:dim], lengths[0] * size, *want.shape[dim + 1 :])
    return np.concatenate(pieces).reshape(shape).take(range(want.shape[dim]), axis=dim)


def reordered_slices(evidence: Evidence) -> str | None:
    """The slices along one dimension are all there, but in another order: of the global tensor where it can be put
    together, else of each rank's part."""
    whole = assembled(evidence)
    if whole is not None:
        for dim in range(evidence.want.ndim):
            order = _order(whole, evidence.want, evidence.tolerance, dim)
            if order is not None and _sure(evidence, [order] * evidence.mesh.size, dim, whole=True):
                return f"{evidence.name}: {_how(evidence, order)} along dimension {dim}"
    for dim in range(max((want.ndim for want in evidence.wants), default=0)):
        orders = list(_local_orders(evidence, dim))
        if len(orders) == evidence.mesh.size and _sure(evidence, orders, dim, whole=False):
            order, found = orders[evidence.wrong_ranks[0]], evidence.wrong_ranks
            where = on_ranks(evidence, found)
            if any(not np.array_equal(orders[rank], order) for rank in found):
                return f"{evidence.name}{where}: the slices along dimension {dim} of the part are in another order"
            return f"{evidence.name}{where}: {_how(evidence, order)} along dimension {dim} of the part"
    return None


def assembled(evidence: Evidence) -> Values | None:
    """The global tensor as the ranks hold it; None where replicas differ."""
    whole = evidence.want.copy()
    written: dict[object, Values] = {}
    for got, part in zip(evidence.got, evidence.windows, strict=True):
        first = written.setdefault((part.lead, part.ranges), got)
        if different(first, got).any():
            return None
        part.take(whole)[...] = got
    return whole


def _local_orders(evidence: Evidence, dim: int) -> Iterator[Order]:
    """Of each rank the order of its slices; shorter where a rank's slices are no others in order."""
    for rank, (got, want) in enumerate(zip(evidence.got, evidence.wants, strict=True)):
        if want.ndim <= dim:
            return
        if rank not in evidence.wrong_ranks:
            yield np.arange(want.shape[dim], dtype=np.int64)
            continue
        order = _order(got, want, None if evidence.limits is None else evidence.limits[rank], dim)
        if order is None:
            return
        yield order


def _order(got: Values, want: Values, tolerance: Values | None, dim: int) -> Order | None:
    """Which slice of ``want`` each slice of ``got`` is, [length]; None unless they are all there, in another order."""
    length = want.shape[dim]
    if not 2 <= length <= _MOST_SLICES or not want.size:
        return None
    held, due = (np.moveaxis(values, dim, 0).reshape(length, -1) for values in (got, want))
    room = np.zeros(due.shape) if tolerance is None else np.moveaxis(tolerance, dim, 0).reshape(length, -1)
    wrong = [i for i in range(length) if beyond(held[i], due[i], room[i]).any()]
    left, order = set(wrong), np.arange(length, dtype=np.int64)
    for i in wrong:
        source = next((j for j in sorted(left - {i}) if not beyond(held[i], due[j], room[j]).any()), None)
        if source is None:
            return None
        order[i] = source
        left.remove(source)
    return order if wrong else None


def _sure(evidence: Evidence, orders: list[Order], dim: int, whole: bool) -> bool:
    if whole:
        explained = evidence.local(evidence.want.take(orders[0], axis=dim))
        tolerance = evidence.tolerance
        allowed = None if tolerance is None else evidence.local(tolerance.take(orders[0], axis=dim))
    else:
        explained = tuple(w.take(o, axis=dim) for w, o in zip(evidence.wants, orders, strict=True))
        limits = evidence.limits
        allowed = None if limits is None else tuple(m.take(o, axis=dim) for m, o in zip(limits, orders, strict=True))
    found = fit(evidence, Explanation(explained, allowed))
    if found is None:
        return False
    # Any order of the slices that moved could have been found, for each different one.
    different_orders = {tuple(order) for order in orders if not np.array_equal(order, np.arange(len(order)))}
    bits = sum(_bits(order) for order in different_orders) + math.log2(max(1, evidence.want.ndim))
    return found.sure(evidence, 2.0 ** min(bits, 1000.0))


def _bits(order: tuple[int, ...]) -> float:
    moved, length = sum(i != j for i, j in enumerate(order)), len(order)
    return (math.lgamma(length + 1) - math.lgamma(length - moved + 1)) / math.log(2)


def _how(evidence: Evidence, order: Order) -> str:
    moved = [i for i, j in enumerate(order) if i != j]
    length = len(order)
    if len(moved) == 2:
        return f"indices {numbers(moved)} are swapped"
    for name, size in evidence.group_sizes.items():
        if length % size == 0 and 1 < size < length:
            dealt = np.arange(length).reshape(size, -1).T.ravel()
            if np.array_equal(order, dealt):
                return f"the pieces of {name} are interleaved, one index of each in turn,"
            if np.array_equal(order, np.argsort(dealt)):
                return f"the indices are dealt out to the pieces of {name} in turn, where contiguous pieces are due,"
    if np.array_equal(order, np.arange(length)[::-1]):
        return "the order is reversed"
    shift = int(order[0])
    if np.array_equal(order, np.roll(np.arange(length), -shift)):
        return f"the order is rotated by {shift if shift <= length // 2 else shift - length}"
    return f"indices {numbers(moved)} are in another order"
