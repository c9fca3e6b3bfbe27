"""The shape of the damage: how much is wrong, where, and the worst of it. Facts, which hold whatever the cause."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.oracle.patterns.evidence import Evidence
from harness.oracle.patterns.formats import format_named, ulp
from harness.oracle.patterns.wording import numbers

_MOST_RANKS = 8
#: Beyond this the values have nothing to do with each other, and the number says nothing.
_MOST_ULPS = 2.0**20


@dataclass(frozen=True)
class Worst:
    """The element that is furthest off. index: in the global tensor; local_index: in the rank's part. error: |got -
    want|, NaN where one of them is. tolerances: the error in units of the tolerance, None where that is zero or the
    comparison exact. ulps: the error in units in the last place of the tensor's dtype, at the larger of both values.
    """

    rank: int
    place: str
    index: tuple[int, ...]
    local_index: tuple[int, ...]
    got: float
    want: float
    error: float
    tolerances: float | None
    ulps: float

    def text(self) -> str:
        off = f"off by {self.error:.6g}" if np.isfinite(self.error) else "not comparable"
        if self.ulps <= _MOST_ULPS:
            off += f", {self.ulps:.3g} ulps"
        if self.tolerances is not None and np.isfinite(self.tolerances):
            off += f", {self.tolerances:.3g} times the tolerance"
        return (
            f"{list(self.index)} (local {list(self.local_index)}) on {self.place}: got {self.got!r}, want "
            f"{self.want!r}, {off}"
        )


@dataclass(frozen=True)
class Damage:
    """wrong, total: elements, counted on every rank that holds them. per_rank: (wrong, total) of each rank.
    dimensions: for each dimension of the global tensor the indices at which something is wrong. shape: the global
    one. worst: None where no element by itself is wrong.
    """

    wrong: int
    total: int
    per_rank: tuple[tuple[int, int], ...]
    dimensions: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    worst: Worst | None

    @property
    def share(self) -> float:
        """The wrong elements among all, 0 to 1."""
        return self.wrong / self.total if self.total else 0.0

    def lines(self) -> list[str]:
        """The damage in words, a line for each fact."""
        if self.worst is None:
            return [f"no element of {self.total} is wrong by itself"]
        lines = [f"wrong: {self.wrong} of {self.total} elements ({self.share:.0%}); {self._ranks()}"]
        where = [
            f"dimension {dim}: {numbers(found)} of 0 to {length - 1}"
            for dim, (found, length) in enumerate(zip(self.dimensions, self.shape, strict=True))
            if len(found) < length
        ]
        if where:
            lines.append(f"only at {'; '.join(where)}")
        return [*lines, f"worst: {self.worst.text()}"]

    def _ranks(self) -> str:
        if len(self.per_rank) > 1 and self.wrong == self.total:
            return "all of every rank"
        texts = [f"rank {rank}: {wrong} of {total}" for rank, (wrong, total) in enumerate(self.per_rank) if wrong]
        more = f" and {len(texts) - _MOST_RANKS} more ranks" if len(texts) > _MOST_RANKS else ""
        return ", ".join(texts[:_MOST_RANKS]) + more


def damage(evidence: Evidence) -> Damage:
    """Counts what is wrong."""
    found = np.zeros(evidence.want.shape, dtype=bool)
    for mask, part in zip(evidence.wrong, evidence.windows, strict=True):
        part.take(found)[...] |= mask
    return Damage(
        wrong=sum(int(mask.sum()) for mask in evidence.wrong),
        total=sum(mask.size for mask in evidence.wrong),
        per_rank=tuple((int(mask.sum()), mask.size) for mask in evidence.wrong),
        dimensions=tuple(tuple(int(i) for i in np.unique(indices)) for indices in np.argwhere(found).T),
        shape=evidence.want.shape,
        worst=_worst(evidence),
    )


def _worst(evidence: Evidence) -> Worst | None:
    """The largest error in units of the tolerance, or in absolute terms where there is none; NaN is worse than all."""
    best: tuple[float, int, tuple[int, ...]] | None = None
    for rank in evidence.wrong_ranks:
        got, want, mask = evidence.got[rank], evidence.wants[rank], evidence.wrong[rank]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            error = np.abs(got - want)
            if evidence.limits is not None:
                error = error / evidence.limits[rank]
        error = np.where(mask, np.nan_to_num(error, nan=np.inf, posinf=np.inf), -1.0)
        at = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
        if best is None or error[at] > best[0]:
            best = float(error[at]), rank, at
    if best is None:
        return None
    _, rank, at = best
    got_at, want_at = float(evidence.got[rank][at]), float(evidence.wants[rank][at])
    error_at = abs(got_at - want_at)
    limit = None if evidence.limits is None else float(evidence.limits[rank][at])
    largest = np.fmax(abs(got_at), abs(want_at))  # fmax takes the number where one is NaN
    unit = float(ulp(np.asarray(largest), format_named(evidence.dtype)))
    return Worst(
        rank=rank,
        place=evidence.mesh.describe(rank),
        index=evidence.windows[rank].global_index(at),
        local_index=at,
        got=got_at,
        want=want_at,
        error=error_at,
        tolerances=error_at / limit if limit else None,
        ulps=error_at / unit,
    )
