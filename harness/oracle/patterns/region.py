"""Where the wrong elements lie, where that alone says something: the last resort when no cause fits."""

from __future__ import annotations

import re

import numpy as np

from harness.oracle.patterns.evidence import Evidence, Mask
from harness.oracle.patterns.wording import listed, on_ranks, ranks
from reference.layout import Split, placements

_PLACE = re.compile(r" is wrong (only|on .* only)|^a single element of | is due, on ")
_NUMBER = re.compile(r" is [-+.e\d]+ times what it should be| is off by the same number, ")

#: Below these, wrong elements lie by chance where they lie.
_LEAST_TAIL = 4
_LEAST_SHARE = 0.9
_LEAST_OTHERS = 8


def says_where(sentence: str) -> bool:
    """Whether a cause is a place, or a number without a name, which say nothing of another case."""
    return any(one.search(sentence) is not None for one in (_PLACE, _NUMBER))


def not_finite(evidence: Evidence) -> str | None:
    """NaN or infinity where a finite value is due, or the other way round, and nothing else wrong."""
    bad, lost, kinds = 0, 0, set()
    for rank in evidence.wrong_ranks:
        got, want, mask = evidence.got[rank], evidence.wants[rank], evidence.wrong[rank]
        new, missing = mask & ~np.isfinite(got) & np.isfinite(want), mask & ~np.isfinite(want) & np.isfinite(got)
        kinds |= {"NaN" if np.isnan(value) else "infinity" for value in got[new]}
        bad, lost = bad + int(new.sum()), lost + int(missing.sum())
    total = sum(int(mask.sum()) for mask in evidence.wrong)
    if bad == total > 0:
        where = f"on {ranks(evidence, evidence.wrong_ranks)}" + ("" if _all_ranks(evidence) else " only")
        return f"{evidence.name} has {listed(sorted(kinds), 'or')} where a finite value is due, {where}"
    if lost == total > 0:
        return f"{evidence.name} is finite where NaN or infinity is due{on_ranks(evidence, evidence.wrong_ranks)}"
    return None


def one_element(evidence: Evidence) -> str | None:
    """A single element of the global tensor, on whatever ranks."""
    found = _global(evidence)
    if found.sum() != 1 or found.size < _LEAST_OTHERS:
        return None
    index = [int(i) for i in np.argwhere(found)[0]]
    return f"a single element of {evidence.name}, {index}, is wrong{on_ranks(evidence, evidence.wrong_ranks)}"


def only_some_ranks(evidence: Evidence) -> str | None:
    """All wrong elements are on ranks of one coordinate, though the others hold such parts too."""
    wrong = set(evidence.wrong_ranks)
    if len(wrong) == 1:
        (rank,) = wrong
        if evidence.mesh.size > 1 and _have_elements(evidence, set(range(evidence.mesh.size)) - wrong):
            copies = [other for other in range(evidence.mesh.size) if _same_place(evidence, rank, other)]
            also = ", though other ranks hold the same part" if len(copies) > 1 else ""
            return f"{evidence.name} is wrong on {evidence.mesh.describe(rank)} only{also}"
        return None
    for name, size in evidence.mesh.axes:
        at = {evidence.mesh.coordinate(rank, name) for rank in wrong}
        others = {r for r in range(evidence.mesh.size) if evidence.mesh.coordinate(r, name) not in at}
        if size > 1 and len(at) == 1 and _have_elements(evidence, others):
            return f"{evidence.name} is wrong only where {name}={at.pop()}"
    return None


def past_an_index(evidence: Evidence) -> str | None:
    """Everything from some flat index of the global tensor on is wrong, and nothing before: a border of buckets."""
    found = _global(evidence).ravel()
    places = np.flatnonzero(found)
    if not places.size:
        return None
    first = int(places[0])
    tail = found.size - first
    if first < _LEAST_TAIL or tail < _LEAST_TAIL or places.size < _LEAST_SHARE * tail:
        return None
    if _whole_tokens(evidence, first):
        return None
    where = f"from flat index {first} of {found.size} on"
    return f"{evidence.name} is wrong only {where}: as if a buffer or bucket ended there"


def _whole_tokens(evidence: Evidence, first: int) -> bool:
    """Whether the border lies between two tokens of an activation, where much else than a bucket begins: what a token
    does not see, or where it stands."""
    return evidence.name.startswith(("output", "input")) and first % evidence.want.shape[-1] == 0


def at_the_borders(evidence: Evidence) -> str | None:
    """Only the first or last index of each shard along the dimension that is cut."""
    for split in (p for p in placements(evidence.layout) if isinstance(p, Split)):
        for last in (False, True):
            if _only_border(evidence, split, last):
                index = f"the {'last' if last else 'first'} index of dimension {split.dim} of each shard"
                where = on_ranks(evidence, evidence.wrong_ranks)
                return f"{evidence.name} is wrong only at {index}, where it is cut{where}"
    return None


def _only_border(evidence: Evidence, split: Split, last: bool) -> bool:
    """Several shards, each long enough for wrong elements to lie elsewhere, with the border all wrong."""
    shards = set()
    for rank in evidence.wrong_ranks:
        part, mask = evidence.windows[rank], evidence.wrong[rank]
        length = mask.shape[split.dim % mask.ndim]
        indices = np.unique(np.argwhere(mask).T[split.dim % mask.ndim])
        if length < 3 or indices.tolist() != [length - 1 if last else 0]:
            return False
        border = mask.take(indices, axis=split.dim)
        if border.mean() < _LEAST_SHARE:
            return False
        shards.add((part.lead, part.ranges))
    return len(shards) > 1


def one_slice(evidence: Evidence) -> str | None:
    """A single index along one dimension of the global tensor."""
    found = _global(evidence)
    for dim, indices in enumerate(np.argwhere(found).T):
        values = np.unique(indices)
        if len(values) == 1 and found.shape[dim] >= 3 and found.take(values, axis=dim).mean() >= _LEAST_SHARE:
            where = on_ranks(evidence, evidence.wrong_ranks)
            return f"{evidence.name} is wrong only at index {int(values[0])} of dimension {dim}{where}"
    return None


def _global(evidence: Evidence) -> Mask:
    found = np.zeros(evidence.want.shape, dtype=bool)
    for mask, part in zip(evidence.wrong, evidence.windows, strict=True):
        part.take(found)[...] |= mask
    return found


def _all_ranks(evidence: Evidence) -> bool:
    return len(evidence.wrong_ranks) == evidence.mesh.size


def _have_elements(evidence: Evidence, among: set[int]) -> bool:
    return any(evidence.got[rank].size for rank in among)


def _same_place(evidence: Evidence, a: int, b: int) -> bool:
    return evidence.windows[a] == evidence.windows[b]
