"""Judges every tensor of a case, exactly or within its computed tolerance, and explains what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from harness.oracle.compare import compare_exact, replicas_disagree, same_bits
from harness.oracle.diagnose import Diagnosis
from harness.oracle.soundness import require_own_memory
from harness.oracle.statistics import Expected
from harness.oracle.within import Judged, Limits, compare_within
from harness.properties.base import World
from harness.verdict import Finding, Verdict
from reference.layout import Layout
from reference.mesh import Mesh

Values = NDArray[np.float64]

#: What must come out: nothing, just these values, or values within a computed tolerance.
Want: TypeAlias = torch.Tensor | Expected | None

#: Says why a tensor is not what it should be: its name, the global values, and the tolerance or None.
Explain = Callable[[str, Values, Values | None], Diagnosis | None]


@dataclass(frozen=True)
class Form:
    """How the ranks hold a tensor: its layout, and torch's name of its dtype."""

    layout: Layout
    dtype: str


def judge_tensors(
    want: Mapping[str, Want], forms: Mapping[str, Form], mesh: Mesh, observed: World, explain: Explain
) -> Verdict:
    """Each tensor against one process, then its replicas against each other; the first that differs is explained.

    The verdict's facts hold the largest ``worst`` and ``slope`` where tensors have tolerances, and how many elements
    were left open.
    """
    findings: list[Finding] = []
    statistics: list[Judged] = []
    for name, value in want.items():
        form = forms[name]
        values: Values | None
        tolerance: Values | None = None
        if value is not None:
            held = (observation.tensors.get(name) for observation in observed)
            wanted = value.want if isinstance(value, Expected) else value.numpy()
            require_own_memory(name, wanted, (tensor.values for tensor in held if tensor is not None))
        if isinstance(value, Expected):
            judged = compare_within(name, value, form.layout, form.dtype, mesh, observed)
            statistics.append(judged)
            values, tolerance, finding = value.want, _tolerance(value), judged.finding
        else:
            values = None if value is None else value.numpy()
            finding = compare_exact(name, values, form.layout, form.dtype, mesh, observed)
        if values is not None:
            if finding is None:
                finding = replicas_disagree(name, form.layout, mesh, observed, values.shape)
            elif not findings:  # one explanation is enough, and takes a while
                finding = explained(finding, explain(name, values, tolerance))
        if finding is not None:
            findings.append(finding)
    return Verdict(tuple(findings), facts=_facts(statistics))


def _tolerance(expected: Expected) -> Values:
    return np.where(expected.ambiguous, np.inf, Limits().worst * expected.tolerance)


def other_bits(mesh: Mesh, worlds: Sequence[World], one_way: str, other: str = "without") -> Iterator[Finding]:
    """One finding where the runs of two worlds, which must not differ in a bit, do. one_way, other: how they were
    made, as in "with overlap", "without"."""
    for rank, (first, second) in enumerate(zip(*worlds, strict=True)):
        place = mesh.describe(rank)
        for name, ours in first.tensors.items():
            theirs = second.tensors.get(name)
            if (ours is None) != (theirs is None):
                message = f"{name} is there only {one_way if theirs is None else other} on {place}"
                yield Finding("mismatch", message, rank, place, name)
                return
            if ours is None or theirs is None or ours.values is None or theirs.values is None:
                continue
            if ours.values.shape != theirs.values.shape or not same_bits(ours.values, theirs.values):
                message = f"{name} has other bits {one_way} than {other} on {place}"
                yield Finding("mismatch", message, rank, place, name)
                return


def explained(finding: Finding, diagnosis: Diagnosis | None) -> Finding:
    """The finding with its cause, where there is one, and the damage."""
    if diagnosis is None:
        return finding
    # The sentence is the finding's cause; what follows it are details.
    lines = diagnosis.lines()[diagnosis.sentence is not None :]
    details = "\n".join([*lines, finding.details]).strip()
    return replace(finding, cause=diagnosis.sentence, details=details)


def _facts(statistics: list[Judged]) -> dict[str, float]:
    if not statistics:
        return {}
    return {
        "worst": max(one.worst for one in statistics),
        "slope": max(one.slope for one in statistics),
        "ambiguous": sum(one.ambiguous for one in statistics),
    }
