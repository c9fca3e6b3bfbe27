"""What the harness says of a case: plain data, made once, never fed back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal[
    "mismatch",  # not what one process computes
    "disagree",  # ranks that must hold the same bits do not
    "side-effect",  # changed something that it must leave alone
    "traffic",  # other collectives than the algebra needs
    "hang",  # ranks wait for each other
    "crash",  # a rank's process died
    "error",  # the candidate raised, or its adapter does not fit the subject
    "flaky",  # failed once, held in fresh processes
    "harness",  # our own fault
]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    message: a sentence. rank and place: where, "rank 3 (tp=1, dp=1)". tensor, index: the first wrong element, in the
    global tensor; local_index: in the rank's own. got and want: its values. tolerance: how far rounding alone explains
    that they differ, None where they must be equal. cause: a sentence, where the pattern of what is wrong is known.
    details: more lines (a traceback, stacks).
    """

    kind: Kind
    message: str
    rank: int | None = None
    place: str | None = None
    tensor: str | None = None
    index: tuple[int, ...] | None = None
    local_index: tuple[int, ...] | None = None
    got: float | None = None
    want: float | None = None
    tolerance: float | None = None
    cause: str | None = None
    details: str = ""


@dataclass(frozen=True)
class Verdict:
    """The findings of one case; none means that it holds. ``rejected`` says why it was not judged at all."""

    findings: tuple[Finding, ...] = ()
    rejected: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return not self.findings and self.rejected is None

    @property
    def kind(self) -> Kind | None:
        """The kind of the first finding, which is the gravest."""
        return self.findings[0].kind if self.findings else None
