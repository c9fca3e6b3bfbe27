"""What training ranks keep beside parameters: every element has one owner along dp, and the model is what the masters
round to."""

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
from harness.properties.mixed_precision_masters import wrong_owners
from harness.verdict import Finding
from reference.layout import Layout, Split, placements
from reference.train_step import TrainStepCase


def joined(case: TrainStepCase, seen: World) -> tuple[Sequence[Observation], Finding | None]:
    """The observations with masters and state in the shape of the rank's part of the parameter, all its elements in
    place of those that it keeps; or what is wrong with who keeps which. Where the parameter itself is cut over dp, as
    its layout says, ranks have no part in common: each keeps all of its own."""
    whole = [dict(one.tensors) for one in seen]
    axes = ("dp",) if "dp" in case.mesh.names else ()
    for group in dict.fromkeys(tuple(case.mesh.group_of(rank, axes)) for rank in range(case.mesh.size)):
        for name in seen[group[0]].facts[OWNED]:
            if _is_cut(seen[group[0]].layouts[name], axes):
                wrong = _keep_their_own(case, seen, whole, group, name)
                if wrong is not None:
                    return seen, wrong
                continue
            own = seen[group[0]].tensors[name]
            assert own is not None
            assert own.values is not None
            shape, size = own.values.shape, own.values.size
            ranges: list[Ranges] = [seen[rank].facts[OWNED][name] for rank in group]
            apart = any(one != ((0, size),) for one in ranges)
            message = wrong_owners(ranges, size) if apart else None
            if message is not None:
                place = case.mesh.describe(group[0])
                text = f"{message} of {name}, among the ranks {list(group)}: expected exactly one"
                return seen, Finding("mismatch", text, group[0], place, name)
            for kind in case.kept:
                _join(whole, group, f"{name}.{kind}", ranges if apart else None, shape)
    return [replace(one, tensors=tensors) for one, tensors in zip(seen, whole, strict=True)], None


def _is_cut(layout: Layout, axes: tuple[str, ...]) -> bool:
    """Whether any of the axes cuts the tensor."""
    named = (part.axis for part in placements(layout) if isinstance(part, Split))
    return any(set(axes) & ({axis} if isinstance(axis, str) else set(axis)) for axis in named)


def _keep_their_own(
    case: TrainStepCase, seen: World, whole: list[dict[str, LocalTensor | None]], group: tuple[int, ...], name: str
) -> Finding | None:
    """Gives what each rank of the group keeps of a parameter the shape of its own part; or a rank that does not keep
    all of that, or more."""
    for rank in group:
        own = seen[rank].tensors[name]
        assert own is not None
        assert own.values is not None
        shape, size = own.values.shape, own.values.size
        ranges: Ranges = seen[rank].facts[OWNED][name]
        message = wrong_owners([ranges], size)
        if message is not None:
            place = case.mesh.describe(rank)
            text = f"{message} of {name}, on {place}, of its own part, which no other rank has: expected exactly one"
            return Finding("mismatch", text, rank, place, name)
        for kind in case.kept:
            _join(whole, (rank,), f"{name}.{kind}", [ranges], shape)
    return None


def _join(
    whole: list[dict[str, LocalTensor | None]],
    group: tuple[int, ...],
    what: str,
    ranges: Sequence[Ranges] | None,
    shape: tuple[int, ...],
) -> None:
    """ranges: that each rank keeps; None where each keeps all."""
    parts = [whole[rank].get(what) for rank in group]
    joint = np.full(int(np.prod(shape)), np.nan)
    for part, own in zip(parts, ranges or [()] * len(group), strict=True):
        at = 0
        for start, stop in own:
            if part is not None and part.values is not None:
                joint[start:stop] = part.values[at : at + stop - start]
            at += stop - start
    for rank, part in zip(group, parts, strict=True):
        if part is not None and part.values is not None:
            values = part.values if ranges is None else joint
            whole[rank][what] = LocalTensor(values.reshape(shape), part.dtype)


def judge_masters(case: TrainStepCase, seen: World) -> Iterator[Finding]:
    """One finding where the model is not the rounded master, exactly."""
    for rank, one in enumerate(seen):
        for name in one.facts[OWNED]:
            ours, kept = one.tensors.get(name), one.tensors.get(f"{name}.master")
            if ours is None or kept is None or ours.values is None or kept.values is None:
                continue
            rounded = torch.tensor(kept.values).to(case.model.format.torch_dtype).to(torch.float64).numpy()
            if not same_bits(rounded, ours.values):
                place = case.mesh.describe(rank)
                at = tuple(int(i) for i in np.unravel_index(int(np.argmax(rounded != ours.values)), rounded.shape))
                message = f"{name} is not its master rounded to {case.dtype} on {place}"
                yield Finding(
                    "mismatch", message, rank, place, name, local_index=at, got=float(ours.values[at]),
                    want=float(rounded[at]),
                )  # fmt: skip
                return
