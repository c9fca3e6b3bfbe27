"""A case that does not hold, as the exception that Hypothesis shrinks."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from harness.bench import Trial
from harness.oracle.diagnose import POSSIBLE
from harness.oracle.patterns.region import says_where
from harness.verdict import Finding, Kind


class Fault(AssertionError):
    """A case that does not hold. One subclass a kind, so that Hypothesis shrinks each kind for itself."""

    def __init__(self, case: Any, trial: Trial) -> None:
        super().__init__(trial.verdict.findings[0].message)
        self.case = case
        self.trial = trial


_FAULTS: dict[str, type[Fault]] = {}


def fault_class(kind: Kind) -> type[Fault]:
    """The subclass of a kind, always the same one."""
    if kind not in _FAULTS:
        _FAULTS[kind] = type(f"Fault_{kind}", (Fault,), {})
    return _FAULTS[kind]


def _about(finding: Finding) -> tuple[Kind, str | None]:
    """The kind and the tensor, of whichever micro-batch: the cause of another one may be another fault."""
    return finding.kind, None if finding.tensor is None else re.sub(r"\[\d+\]", "", finding.tensor)


def with_cause(fault: Fault, confirmed: Fault) -> Fault:
    """A shrunk case may have too few values to tell why: then what the case that failed first told."""
    found, first = fault.trial.verdict.findings, confirmed.trial.verdict.findings[0]
    if found[0].cause is not None or first.cause is None or _about(found[0]) != _about(first):
        return fault
    if says_where(first.cause):
        return fault  # on ranks, and at indices, that the shrunk case may not have
    cause = f"{first.cause} (seen in the case that failed first, before it was shrunk)"
    details = "\n".join(line for line in found[0].details.splitlines() if not line.startswith(POSSIBLE))
    told = replace(found[0], cause=cause, details=details)
    verdict = replace(fault.trial.verdict, findings=(told, *found[1:]))
    return type(fault)(fault.case, replace(fault.trial, verdict=verdict))
