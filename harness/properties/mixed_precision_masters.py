"""Masters: where they are cut over dp each element has one owner; the model is what they round to; and tied copies have
the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from harness.mixed_precision_reading import Ranges
from harness.mixed_precision_steps import OWNED
from harness.observation import LocalTensor, Observation
from harness.oracle.compare import same_bits
from harness.properties.base import World
from harness.verdict import Finding
from reference.mixed_precision import MixedPrecisionCase
from reference.mixed_precision_steps import names


def joined(case: MixedPrecisionCase, seen: World) -> tuple[Sequence[Observation], Finding | None]:
    """The observations with masters and state of all the elements that a rank holds, in place of those that it keeps;
    or what is wrong with who keeps which."""
    whole = [dict(one.tensors) for one in seen]
    for group in _groups(case):
        for step in range(case.steps):
            for name in seen[group[0]].facts[OWNED][step]:
                i = int(name.removeprefix("parameter"))
                held = case.window(i, group[0])
                ranges = [_ranges(seen[rank], step, name) for rank in group]
                if all(own == ((0, held.stop - held.start),) for own in ranges):
                    continue
                message = wrong_owners(ranges, held.stop - held.start)
                if message is not None:
                    place = case.mesh.describe(group[0])
                    text = f"{message} of {name}, among the ranks {list(group)} in step {step}: expected exactly one"
                    return seen, Finding("mismatch", text, group[0], place, f"{name}[{step}]")
                _join(case, seen, whole, group, i, step, ranges)
    return [replace(one, tensors=tensors) for one, tensors in zip(seen, whole, strict=True)], None


def _join(
    case: MixedPrecisionCase,
    seen: World,
    whole: list[dict[str, LocalTensor | None]],
    group: tuple[int, ...],
    i: int,
    step: int,
    ranges: Sequence[Ranges],
) -> None:
    held = case.window(i, group[0])
    index = case.stages(i).index(case.mesh.coordinate(group[0], "pp"))
    for kind in ("master", *case.states):
        name = names(case, kind, i, step)[index]
        parts = [seen[rank].tensors.get(name) for rank in group]
        values = np.full(held.stop - held.start, np.nan)
        for part, own in zip(parts, ranges, strict=True):
            at = 0
            for start, stop in own:
                if part is not None and part.values is not None:
                    values[start:stop] = part.values[at : at + stop - start]
                at += stop - start
        for rank, part in zip(group, parts, strict=True):
            if part is not None:
                whole[rank][name] = LocalTensor(values, part.dtype)


def wrong_owners(ranges: Sequence[Ranges], size: int) -> str | None:
    """Of which element there is not exactly one owner; None where of each there is. ranges: that each rank keeps."""
    owners = [0] * size
    for own in ranges:
        for start, stop in own:
            if not 0 <= start <= stop <= size:
                return f"elements {start} to {stop} of {size} are kept"
            for element in range(start, stop):
                owners[element] += 1
    wrong = next((element for element, count in enumerate(owners) if count != 1), None)
    return None if wrong is None else f"{owners[wrong] or 'no'} ranks keep element {wrong} of {size}"


def _ranges(seen: Observation, step: int, name: str) -> Ranges:
    found: Ranges = seen.facts[OWNED][step][name]
    return found


def _groups(case: MixedPrecisionCase) -> list[tuple[int, ...]]:
    axes = ("dp",) if "dp" in case.mesh.names else ()
    return list(dict.fromkeys(tuple(case.mesh.group_of(rank, axes)) for rank in range(case.mesh.size)))


def judge_masters(case: MixedPrecisionCase, seen: World) -> Iterator[Finding]:
    """One finding where the model is not the rounded master, exactly."""
    for i in range(len(case.parameters)):
        if not case.has_master(i):
            continue
        for step in range(case.steps):
            for model, master in zip(names(case, "parameter", i, step), names(case, "master", i, step), strict=True):
                for rank, one in enumerate(seen):
                    ours, kept = one.tensors.get(model), one.tensors.get(master)
                    if ours is None or kept is None or ours.values is None or kept.values is None:
                        continue
                    rounded = torch.tensor(kept.values).to(case.format_of(i).torch_dtype).to(torch.float64).numpy()
                    if not same_bits(rounded, ours.values):
                        place = case.mesh.describe(rank)
                        at = int(np.argmax(rounded != ours.values))
                        message = f"{model} is not the master rounded to {case.format_of(i).name} on {place}"
                        yield Finding(
                            "mismatch", message, rank, place, model, local_index=(at,), got=float(ours.values[at]),
                            want=float(rounded[at]),
                        )  # fmt: skip
                        return


def judge_copies(case: MixedPrecisionCase, seen: World) -> Iterator[Finding]:
    """One finding where the copies of a tied parameter have other bits."""
    for i in range(len(case.parameters)):
        stages = case.stages(i)
        if len(stages) < 2:
            continue
        for step in range(case.steps):
            for kind in ("parameter", "master", *case.states):
                first, second = names(case, kind, i, step)
                for rank, one in enumerate(seen):
                    if case.mesh.coordinate(rank, "pp") != stages[1]:
                        continue
                    other = _at_stage(case, rank, stages[0])
                    ours, theirs = one.tensors.get(second), seen[other].tensors.get(first)
                    if ours is None or theirs is None or ours.values is None or theirs.values is None:
                        continue
                    if not same_bits(ours.values, theirs.values):
                        place, there = case.mesh.describe(rank), case.mesh.describe(other)
                        message = f"{kind}{i} is tied, and after step {step} has other bits on {place} than on {there}"
                        yield Finding("disagree", message, rank, place, second)
                        return


def _at_stage(case: MixedPrecisionCase, rank: int, stage: int) -> int:
    """The rank of the same coordinates on another stage."""
    return int(case.mesh.group_of(rank, "pp")[stage])
