"""The initial parameters of a linear layer, as they are before the harness fills them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.oracle.compare import compare_exact, different, replicas_disagree, same_bits
from harness.properties.base import Description, World
from harness.properties.linear_suspects import explain
from harness.properties.tensors import explained
from harness.verdict import Finding
from reference.layout import Layout, Partial, placements, window
from reference.linear import LinearCase

#: Bits of random data below which two shards may be alike by chance.
_ENOUGH_BITS = 64


def judge_initial(case: LinearCase, description: Description, worlds: Sequence[World]) -> list[Finding]:
    """The initial parameters: replicas equal; shards those of the one-process tensor, or at least not alike."""
    findings, dtype = [], str(case.format.torch_dtype).removeprefix("torch.")
    shapes = {"weight": (case.out_features, case.in_features), "bias": (case.out_features,)}
    for name in ("weight", "bias") if case.bias else ("weight",):
        tensor = f"{name}.initial"
        layout = worlds[0][0].layouts.get(tensor)
        if layout is None or any(isinstance(p, Partial) for p in placements(layout)):
            continue
        if len(worlds) > 1:
            alone = worlds[1][0].tensors[tensor]
            whole = None if alone is None else alone.values
            finding = compare_exact(tensor, whole, layout, dtype, case.mesh, worlds[0])
            if finding is not None:
                why = explain(case, description, tensor, worlds[0], layout, whole, None, dtype)
                finding = explained(finding, why)
        else:
            finding = replicas_disagree(tensor, layout, case.mesh, worlds[0], shapes[name]) or _alike(
                case, tensor, layout, shapes[name], worlds[0]
            )
        if finding is not None:
            findings.append(finding)
    return findings


def _alike(case: LinearCase, tensor: str, layout: Layout, shape: tuple[int, ...], observed: World) -> Finding | None:
    """Two shards at different places with the same random values, or None."""
    seen: list[tuple[int, object, np.ndarray]] = []
    for rank, observation in enumerate(observed):
        local = observation.tensors.get(tensor)
        if local is None or local.values is None:
            continue
        values, place = local.values, window(shape, layout, case.mesh, rank)
        constant = values.size == 0 or not different(values, np.full_like(values, values.flat[0])).any()
        if constant or values.size * case.format.precision < _ENOUGH_BITS:
            continue
        for other, other_place, other_values in seen:
            if place != other_place and same_bits(values, other_values):
                return Finding(
                    "mismatch",
                    f"{tensor}: the shards of {case.mesh.describe(other)} and {case.mesh.describe(rank)} are "
                    "identical, as if every shard were initialised from the same seed",
                    rank,
                    case.mesh.describe(rank),
                    tensor,
                )
        seen.append((rank, place, values))
    return None
