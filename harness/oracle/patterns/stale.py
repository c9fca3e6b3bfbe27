"""Values that were never written or belong to another moment: zeros, the initial value, another micro-batch."""

from __future__ import annotations

import re

import numpy as np

from harness.oracle.compare import different
from harness.oracle.patterns.evidence import Evidence
from harness.oracle.patterns.fit import Explanation, fit
from harness.oracle.patterns.suspected import fitting
from harness.oracle.patterns.wording import of_ranks

_NUMBERED = re.compile(r"(.*)\[(\d+)\](.*)")


def zeros(evidence: Evidence) -> str | None:
    """Nothing but zeros on every wrong rank. Suspects that predict just that are named too, however few the values."""
    if not evidence.wrong_ranks or any(evidence.got[rank].any() for rank in evidence.wrong_ranks):
        return None
    # The right ranks hold what they should: that much goes with values that were never written.
    held = [np.zeros(want.shape) if r in evidence.wrong_ranks else want for r, want in enumerate(evidence.wants)]
    found = fit(evidence, Explanation(tuple(held)))
    if found is None or not found.sure(evidence):
        return None
    causes = "".join(f", or it {cause}" for _, cause in fitting(evidence).fits)
    return f"{of_ranks(evidence, found.ranks)} is zero everywhere: never written, or overwritten{causes}"


def another_tensor(evidence: Evidence) -> str | None:
    """The values of another tensor of the case on every wrong rank: of another micro-batch, or the initial one."""
    candidates = {
        name: values
        for name, values in evidence.others.items()
        if name != evidence.name and values.shape == evidence.want.shape and different(values, evidence.want).any()
    }
    equal = []
    for name, values in candidates.items():
        found = fit(evidence, Explanation(evidence.local(values)))
        if found is not None and found.sure(evidence, len(candidates)):
            equal.append((name, values, found))
    if not equal or any(different(values, equal[0][1]).any() for _, values, _ in equal):
        return None
    name, _, found = equal[0]
    who = of_ranks(evidence, found.ranks)
    ours, theirs = _NUMBERED.fullmatch(evidence.name), _NUMBERED.fullmatch(name)
    if ours and theirs and (ours[1], ours[3]) == (theirs[1], theirs[3]):
        return f"{who} equals {name}: stale or overwritten, the values of another micro-batch"
    if name == f"{evidence.name}.initial":
        return f"{who} holds its initial values: it was never updated"
    return f"{who} equals {name}: another tensor's values"
