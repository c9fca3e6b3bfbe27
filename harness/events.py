"""What happens during a run, as data: the engine emits events, the command line and the reports consume them.

What a candidate said (messages, reasons, versions) is made printable here, for whoever consumes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

from harness.case_file import Reproducer
from harness.printable import printable, printable_lines
from harness.verdict import Finding, Kind, Verdict

_set = object.__setattr__  # a frozen dataclass may complete itself while it is made

Result = Literal["held", "fault", "not offered", "nothing ran"]


def _printable(finding: Finding) -> Finding:
    texts = {f.name: getattr(finding, f.name) for f in fields(finding) if isinstance(getattr(finding, f.name), str)}
    made: dict[str, Any] = {name: printable(text) for name, text in texts.items()}
    return replace(finding, **made | {"details": printable_lines(finding.details)})


@dataclass(frozen=True)
class Failure:
    """A case that does not hold, shrunk; ``history`` for a flaky one, ``saved`` where it was written, or ``not_saved``
    why it could not be."""

    reproducer: Reproducer
    verdict: Verdict
    history: tuple[str, ...] = ()
    saved: str | None = None
    not_saved: str | None = None

    def __post_init__(self) -> None:
        _set(self, "verdict", replace(self.verdict, findings=tuple(map(_printable, self.verdict.findings))))

    @property
    def kind(self) -> Kind:
        assert self.verdict.kind is not None
        return self.verdict.kind


@dataclass(frozen=True)
class Row:
    """One subject of one candidate. ``examples`` were run and judged, on ``meshes`` distinct meshes; ``rejected`` were
    refused by the candidate; ``stopped`` says why fewer ran than were asked for. The first fault was found after
    ``found_after`` examples; the rest of them shrank it. ``refusals``: the candidate's reasons, and how often each was
    given. In ``left_open`` of the examples the order of a sum near the format's largest number decides what some values
    are, and they were not judged. Seconds of wall time."""

    candidate: str
    subject: str
    result: Result
    examples: int = 0
    meshes: int = 0
    rejected: int = 0
    seconds: float = 0.0
    failures: tuple[Failure, ...] = ()
    stopped: str | None = None
    found_after: int | None = None
    refusals: tuple[tuple[str, int], ...] = ()
    left_open: int = 0

    def __post_init__(self) -> None:
        _set(self, "stopped", None if self.stopped is None else printable(self.stopped))
        _set(self, "refusals", tuple((printable(why), times) for why, times in self.refusals))


@dataclass(frozen=True)
class RunStarted:
    seed: int
    candidates: tuple[str, ...]
    subjects: tuple[str, ...]
    examples: int
    max_world: int


@dataclass(frozen=True)
class CandidateDescribed:
    candidate: str
    library: str

    def __post_init__(self) -> None:
        _set(self, "library", printable(self.library))


@dataclass(frozen=True)
class SubjectStarted:
    candidate: str
    subject: str
    examples: int


@dataclass(frozen=True)
class CaseJudged:
    candidate: str
    subject: str
    failing: bool


@dataclass(frozen=True)
class SubjectDone:
    row: Row


@dataclass(frozen=True)
class RunDone:
    """interrupted: a signal ended the run before all rows were done; what was known by then is in them."""

    seed: int
    rows: tuple[Row, ...]
    seconds: float
    libraries: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False

    def __post_init__(self) -> None:
        _set(self, "libraries", {candidate: printable(library) for candidate, library in self.libraries.items()})


Event: TypeAlias = RunStarted | CandidateDescribed | SubjectStarted | CaseJudged | SubjectDone | RunDone
Listener: TypeAlias = Callable[[Event], None]
