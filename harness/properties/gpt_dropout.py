"""Dropout of a GPT: the masks that its ranks drew, what must be alike or different among them, and what they give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness.drawn import DRAWN
from harness.observation import Observation
from harness.properties.base import World
from harness.verdict import Finding, Verdict
from reference.gpt import GptCase
from reference.gpt_dropout import Masks, mask_layout, mask_shape
from reference.layout import window
from reference.transformer_dropout import mask_name

#: Equal masks are a fault where by chance they come with a probability of less than 2 to the power of minus this. A
#: case has fewer than 2^9 masks, and 2^18 pairs of them and of joined ones: one right case in 2^30 would be refused.
_SURELY = 48

#: Judges all values with the masks of each step; careful: with more disturbed runs.
Judge = Callable[[Sequence[Masks], bool], Verdict]


def judge_with_masks(case: GptCase, seen: World, judge: Judge) -> Verdict:
    """The masks, and if these may be, the values that one process has which drops the same."""
    wrong = next(_wrong_masks(case, seen), None)
    if wrong is not None:
        return Verdict((wrong,))
    verdicts = []
    for ones_are_kept in (True, False) if case.dropout == 0.5 else (True,):
        kept = [_whole(case, seen, step, ones_are_kept) for step in seen[0].facts[DRAWN]]
        verdict = judge(kept, False)
        if verdict.findings:  # tolerances are estimated: a second look with more disturbed runs
            verdict = judge(kept, True)
        if not verdict.findings:
            return verdict
        verdicts.append(verdict)
    verdict = min(verdicts, key=lambda one: len(one.findings))
    told = [replace(one, message=f"{one.message}, with the masks that forward drew") for one in verdict.findings]
    return replace(verdict, findings=tuple(told))


def _whole(case: GptCase, seen: World, step: int, ones_are_kept: bool) -> dict[str, torch.Tensor]:
    """The global masks of a step, put together from those of the ranks."""
    found: dict[str, torch.Tensor] = {}
    for rank, one in enumerate(seen):
        for (m, place), drawn in one.facts[DRAWN][step].items():
            shape = mask_shape(case, place, m)
            whole = found.setdefault(mask_name(place, m), torch.ones(shape, dtype=torch.bool))
            part = window(shape, mask_layout(case, place), case.mesh, rank).take(whole)
            part.copy_(torch.from_numpy(drawn.kept(case.dropout, ones_are_kept)))
    return found


def _wrong_masks(case: GptCase, seen: World) -> Iterator[Finding]:
    yield from _along_tp(case, seen)
    along = ("pp",) if "pp" in case.mesh.names else ()
    for group in dict.fromkeys(tuple(case.mesh.group_of(rank, along)) for rank in range(case.mesh.size)):
        yield from _repeated(case, seen, group)


def _along_tp(case: GptCase, seen: World) -> Iterator[Finding]:
    """Masks of what all ranks along tp hold are the same on these; those of their own heads and tokens differ."""
    mesh = case.mesh
    for group in mesh.groups("tp") if "tp" in mesh.names else ():
        first, *others = (int(rank) for rank in group)
        for rank in others:
            where = f"on {mesh.describe(first)} and {mesh.describe(rank)}"
            here = _by_place(seen[rank])
            for place, drawn in _by_place(seen[first]).items():
                own = place.endswith("probabilities") or case.sequence_parallel
                alike = bool(np.array_equal(drawn, here[place]))
                if not own and not alike:
                    message = f"the dropout masks of {place} differ {where}: replicas drift apart"
                    yield Finding("disagree", message, rank, mesh.describe(rank))
                elif own and alike and _tells(case, drawn):
                    message = f"the dropout masks of {place} are the same {where}, which hold other parts of it"
                    yield Finding("mismatch", message, rank, mesh.describe(rank))


def _repeated(case: GptCase, seen: World, group: Sequence[int]) -> Iterator[Finding]:
    """On the ranks of one pipeline no mask comes twice: not in another micro-batch or step. Small ones say little; so
    neither do all of a micro-batch, of a step, or of a place, one after another."""
    mesh = case.mesh
    for kind in (_single, _by_micro_batch, _by_step, _by_place):
        known: dict[tuple[tuple[int, ...], bytes], str] = {}
        for rank in group:
            for what, ones in kind(seen[rank]).items():
                where = f"{what} on {mesh.describe(rank)}"
                before = known.setdefault((ones.shape, ones.tobytes()), where) if _tells(case, ones) else where
                if before != where:
                    message = f"the dropout masks of {before}, and of {where}, are the same: expected one for each"
                    yield Finding("mismatch", message, rank, mesh.describe(rank))


Ones = dict[str, NDArray[Any]]


def _single(seen: Observation) -> Ones:
    return {
        f"{place} in micro-batch {m} of step {step}": drawn.ones
        for step, masks in seen.facts[DRAWN].items()
        for (m, place), drawn in masks.items()
    }


def _by_micro_batch(seen: Observation) -> Ones:
    found: dict[str, list[NDArray[Any]]] = {}
    for step, masks in seen.facts[DRAWN].items():
        for m, place in sorted(masks):
            found.setdefault(f"micro-batch {m} of step {step}", []).append(masks[m, place].ones.flatten())
    return {what: np.concatenate(ones) for what, ones in found.items()}


def _by_step(seen: Observation) -> Ones:
    return {
        f"step {step}": np.concatenate([masks[at].ones.flatten() for at in sorted(masks)])
        for step, masks in seen.facts[DRAWN].items()
        if masks
    }


def _by_place(seen: Observation) -> Ones:
    """The masks of all steps and micro-batches, one after another, [1, elements]."""
    found: dict[str, list[NDArray[Any]]] = {}
    for masks in seen.facts[DRAWN].values():
        for m, place in sorted(masks):
            found.setdefault(place, []).append(masks[m, place].ones.flatten())
    return {place: np.concatenate(ones)[None] for place, ones in found.items()}


def _tells(case: GptCase, ones: NDArray[Any]) -> bool:
    """Whether two masks of this size hardly come out equal by chance: each element does with p^2 + (1 - p)^2."""
    p = case.dropout
    return -math.log2(p * p + (1 - p) ** 2) * ones.size >= _SURELY
