"""Sharded state: every element has exactly one owner, and the owners' parts join to what one process keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from harness.observation import LocalTensor, Observation
from harness.optimize import OWNED, Ranges
from harness.properties.base import World
from harness.verdict import Finding
from reference.sharded_optimizer import ShardedOptimizerCase


def judge_ownership(case: ShardedOptimizerCase, observed: World) -> Iterator[Finding]:
    """One finding for the first parameter with an element that has no owner, or several, in the group of some rank.
    Nothing is said where a candidate does not say what it owns."""
    said = [rank for rank, seen in enumerate(observed) if seen.facts.get(OWNED)]
    if said and len(said) < len(observed):
        silent = next(rank for rank in range(len(observed)) if rank not in said)
        place = case.mesh.describe(silent)
        yield Finding("disagree", f"{place} does not say what it owns, and rank {said[0]} does", silent, place)
    if len(said) < len(observed):
        return
    for step in range(case.steps):
        for group in _groups(case, step):
            for i in case.trained:
                message = _wrong(case, observed, group, step, i)
                if message is not None:
                    place = case.mesh.describe(group[0])
                    yield Finding("mismatch", message, group[0], place, f"parameter{i}[{step}]")
                    return


def _wrong(case: ShardedOptimizerCase, observed: World, group: tuple[int, ...], step: int, i: int) -> str | None:
    size, name = case.parameters[i].elements, f"parameter{i}"
    owners: list[list[int]] = [[] for _ in range(size)]
    for rank in group:
        for start, stop in _ranges(observed[rank], step, name):
            if not 0 <= start <= stop <= size:
                return f"rank {rank} owns {start} to {stop} of {name}, which has {size} elements, in step {step}"
            for element in range(start, stop):
                owners[element].append(rank)
    for element, found in enumerate(owners):
        if len(found) != 1:
            ranks = f"{len(found)} owners, ranks {', '.join(map(str, found))}" if found else "no owner"
            return (
                f"element {element} of {size} of {name} has {ranks} among the ranks {list(group)} in step {step}: "
                "expected exactly one"
            )
    return None


def with_joined_state(case: ShardedOptimizerCase, observed: World) -> list[Observation]:
    """The observations with state tensors of a whole parameter, [elements], in place of each owner's part. Ownership
    must hold."""
    joined = [dict(seen.tensors) for seen in observed]
    for step in range(case.steps):
        for group in _groups(case, step):
            for i in case.trained:
                for kind in case.states:
                    name = f"{kind}{i}[{step}]"
                    whole = _joined(case, observed, group, step, i, name)
                    for rank in group:
                        if whole is not None:
                            joined[rank][name] = whole
    return [replace(seen, tensors=tensors) for seen, tensors in zip(observed, joined, strict=True)]


def _joined(
    case: ShardedOptimizerCase, observed: World, group: tuple[int, ...], step: int, i: int, name: str
) -> LocalTensor | None:
    parts = [observed[rank].tensors.get(name) for rank in group]
    values = np.full(case.parameters[i].elements, np.nan)
    for rank, part in zip(group, parts, strict=True):
        if part is None or part.values is None:
            return None
        at = 0
        for start, stop in _ranges(observed[rank], step, f"parameter{i}"):
            values[start:stop] = part.values[at : at + stop - start]
            at += stop - start
    assert parts[0] is not None
    return LocalTensor(values, parts[0].dtype)


def _ranges(seen: Observation, step: int, name: str) -> Ranges:
    found: Ranges = seen.facts[OWNED][step][name]
    return found


def _groups(case: ShardedOptimizerCase, step: int) -> list[tuple[int, ...]]:
    """The ranks that shard the state in a step, each group once."""
    axis = case.axis_at(step)
    return list(dict.fromkeys(tuple(case.mesh.group_of(rank, axis)) for rank in range(case.mesh.size)))
