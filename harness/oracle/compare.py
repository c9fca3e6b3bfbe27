"""Exact comparison of what the ranks hold with what one process computes. NaN-safe throughout.

A NaN where none is expected is wrong, a NaN where one is expected is right; +0 and -0 are equal, since the sign of a
zero sum depends on the order of summation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.observation import LocalTensor, Observation
from harness.verdict import Finding
from reference.layout import Layout, Window, layout_in_words, partial_axes, window
from reference.mesh import Mesh

Values = NDArray[np.float64]


def compare_exact(
    name: str,
    want: Values | None,
    layout: Layout,
    dtype: str,
    mesh: Mesh,
    observed: Sequence[Observation],
) -> Finding | None:
    """The first way in which tensor ``name`` is wrong on any rank, or None.

    want: the global values, or None where there must be no such tensor. layout: how the ranks hold it. dtype: torch's
    name of the dtype that the ranks must hold it in.
    """
    if want is None:
        return must_be_absent(name, mesh, observed)
    sums = held_values(name, want.shape, layout, dtype, mesh, observed)
    if isinstance(sums, Finding):
        return sums
    wrong = {rank: different(got, window(want.shape, layout, mesh, rank).take(want)) for rank, got in enumerate(sums)}
    wrong = {rank: mask for rank, mask in wrong.items() if mask.any()}
    if not wrong:
        return None
    return described(name, want, layout, mesh, sums, wrong)


def different(got: Values, want: Values) -> NDArray[np.bool_]:
    """Where two arrays of one shape differ: NaN equals NaN, +0 equals -0."""
    same: NDArray[np.bool_] = (got == want) | (np.isnan(got) & np.isnan(want))
    return ~same


def same_bits(a: Values, b: Values) -> bool:
    """Whether two float64 arrays agree bit by bit, signs of zeros and payloads of NaN included."""
    return a.shape == b.shape and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def replicas_disagree(
    name: str, layout: Layout, mesh: Mesh, observed: Sequence[Observation], shape: tuple[int, ...]
) -> Finding | None:
    """The first rank whose copy of a replicated tensor is not bit-identical with the first copy, or None."""
    partial = partial_axes(layout)
    first: dict[Any, tuple[int, Values]] = {}
    for rank, observation in enumerate(observed):
        local = observation.tensors.get(name)
        if local is None or local.values is None:
            continue
        part = window(shape, layout, mesh, rank)
        summand = mesh.coordinate(rank, partial)
        other, values = first.setdefault((part.lead, part.ranges, summand), (rank, local.values))
        if not same_bits(values, local.values):
            return Finding(
                "disagree",
                f"{name} is replicated on {mesh.describe(other)} and {mesh.describe(rank)}, but its bits differ",
                rank,
                mesh.describe(rank),
                name,
            )
    return None


def must_be_absent(name: str, mesh: Mesh, observed: Sequence[Observation]) -> Finding | None:
    """The first rank that holds a tensor which must not exist, or None."""
    for rank, observation in enumerate(observed):
        if observation.tensors.get(name) is not None:
            return _finding(mesh, rank, name, f"{name} exists, but nothing that it belongs to asks for a gradient")
    return None


def held_values(
    name: str,
    shape: tuple[int, ...],
    layout: Layout,
    dtype: str,
    mesh: Mesh,
    observed: Sequence[Observation],
) -> list[Values] | Finding:
    """The values to judge on each rank, summed over axes that the layout declares partial; or the first rank whose
    tensor is missing or has another form. shape: the global one."""
    held: list[LocalTensor] = []
    for rank, observation in enumerate(observed):
        local = observation.tensors.get(name)
        problem = _form(local, window(shape, layout, mesh, rank), dtype)
        if problem is not None or local is None:
            return _finding(mesh, rank, name, f"{name} {problem or 'is missing'}")
        held.append(local)
    return _summed(held, layout, mesh)


def _form(local: LocalTensor | None, part: Window, dtype: str) -> str | None:
    if local is None:
        return "is missing"
    if local.values is None:
        return local.problem or "holds no values"
    if local.values.shape != part.shape:
        return f"has local shape {local.values.shape}; expected {part.shape}"
    if local.dtype != dtype:
        return f"has dtype {local.dtype}; expected {dtype}"
    return None


def _summed(held: Sequence[LocalTensor], layout: Layout, mesh: Mesh) -> list[Values]:
    """The values to judge on each rank: summed over the axes that the layout declares partial."""
    values = [np.asarray(local.values) for local in held]
    axes = partial_axes(layout)
    if not axes:
        return values
    sums = list(values)
    for group in mesh.groups(axes):
        with np.errstate(invalid="ignore", over="ignore"):  # opposite infinities are in the data now and then
            total = np.sum([values[rank] for rank in group], axis=0)
        for rank in group:
            sums[rank] = total
    return sums


def described(
    name: str,
    want: Values,
    layout: Layout,
    mesh: Mesh,
    got: Sequence[Values],
    wrong: Mapping[int, NDArray[np.bool_]],
) -> Finding:
    """The finding of a tensor whose elements are wrong where the masks, by rank, say so."""
    rank = min(wrong)
    mask, part = wrong[rank], window(want.shape, layout, mesh, rank)
    local = tuple(int(i) for i in np.argwhere(mask)[0])
    g, w = float(got[rank][local]), float(part.take(want)[local])
    elements, total = int(sum(m.sum() for m in wrong.values())), int(sum(v.size for v in got))
    ranks = "every rank" if len(wrong) == len(got) and len(got) > 1 else ", ".join(f"rank {r}" for r in sorted(wrong))
    return Finding(
        "mismatch",
        f"{name} differs from one process on {ranks}: {elements} of {total} elements",
        rank,
        mesh.describe(rank),
        name,
        part.global_index(local),
        local,
        g,
        w,
        details=f"layout: {layout_in_words(layout)}",
    )


def _finding(mesh: Mesh, rank: int, name: str, message: str) -> Finding:
    return Finding("mismatch", f"{message} on {mesh.describe(rank)}", rank, mesh.describe(rank), name)
