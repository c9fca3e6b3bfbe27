"""The initial parameters of a layer, as they are before the harness fills them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness.oracle.compare import compare_exact, different, replicas_disagree, same_bits
from harness.oracle.diagnose import Diagnosis, diagnose, evidence_of
from harness.properties.base import Description, World
from harness.properties.modules import Values
from harness.properties.tensors import explained
from harness.verdict import Finding
from reference.dtypes import Format
from reference.layout import Layout, Partial, placements, window
from reference.mesh import Mesh

#: Bits of random data below which two shards may be alike by chance.
_ENOUGH_BITS = 64


@dataclass(frozen=True)
class Alone:
    """The second run of a case with ``init``: the layer on one rank, of which only the initial parameters count."""

    case: Any

    @property
    def mesh(self) -> Mesh:
        mesh: Mesh = self.case.mesh
        return mesh


def case_of(run: Any) -> Any:
    """The case of a run, which may be `Alone`."""
    return run.case if isinstance(run, Alone) else run


def runs(case: Any, description: Description) -> Sequence[Any]:
    """With ``init`` and a full initialisation, also the same layer on one rank."""
    if not case.init or description.initialization != "full" or case.mesh.size == 1:
        return (case,)
    return case, Alone(replace(case, mesh=Mesh(tuple((name, 1) for name in case.mesh.names))))


def judge_initial(
    mesh: Mesh,
    fmt: Format,
    shapes: Mapping[str, tuple[int, ...]],
    worlds: Sequence[World],
    why: Callable[[str, Layout, Values], Diagnosis | None] | None = None,
) -> Iterator[Finding]:
    """Of the parameters of these global shapes: replicas equal; shards those of the one-process tensor, or at least not
    alike. why: explains a wrong tensor, given its layout and the one-process values; by default general patterns do."""
    dtype = str(fmt.torch_dtype).removeprefix("torch.")
    for name, shape in shapes.items():
        tensor = f"{name}.initial"
        layout = worlds[0][0].layouts.get(tensor)
        if layout is None or any(isinstance(p, Partial) for p in placements(layout)):
            continue
        if len(worlds) > 1:
            alone = worlds[1][0].tensors[tensor]
            whole = None if alone is None else alone.values
            finding = compare_exact(tensor, whole, layout, dtype, mesh, worlds[0])
            if finding is not None and whole is not None:
                if why is None:
                    evidence = evidence_of(tensor, worlds[0], layout, mesh, whole, None, dtype)
                    diagnosis = None if evidence is None else diagnose(evidence)
                else:
                    diagnosis = why(tensor, layout, whole)
                finding = explained(finding, diagnosis)
        else:
            finding = replicas_disagree(tensor, layout, mesh, worlds[0], shape)
            finding = finding or _alike(mesh, fmt, tensor, layout, shape, worlds[0])
        if finding is not None:
            yield finding


def _alike(
    mesh: Mesh, fmt: Format, tensor: str, layout: Layout, shape: tuple[int, ...], observed: World
) -> Finding | None:
    """Two shards at different places with the same random values, or None."""
    seen: list[tuple[int, object, np.ndarray]] = []
    for rank, observation in enumerate(observed):
        local = observation.tensors.get(tensor)
        if local is None or local.values is None:
            continue
        values, place = local.values, window(shape, layout, mesh, rank)
        constant = values.size == 0 or not different(values, np.full_like(values, values.flat[0])).any()
        if constant or values.size * fmt.precision < _ENOUGH_BITS:
            continue
        for other, other_place, other_values in seen:
            if place != other_place and same_bits(values, other_values):
                return Finding(
                    "mismatch",
                    f"{tensor}: the shards of {mesh.describe(other)} and {mesh.describe(rank)} are "
                    "identical, as if every shard were initialised from the same seed",
                    rank,
                    mesh.describe(rank),
                    tensor,
                )
        seen.append((rank, place, values))
    return None
