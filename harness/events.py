"""What happens during a run, as data: the engine emits events, the command line and the reports consume them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from harness.case_file import Reproducer
from harness.verdict import Kind, Verdict

Result = Literal["held", "fault", "not offered", "nothing ran"]


@dataclass(frozen=True)
class Failure:
    """A case that does not hold, shrunk; ``history`` for a flaky one, ``saved`` where it was written."""

    reproducer: Reproducer
    verdict: Verdict
    history: tuple[str, ...] = ()
    saved: str | None = None

    @property
    def kind(self) -> Kind:
        assert self.verdict.kind is not None
        return self.verdict.kind


@dataclass(frozen=True)
class Row:
    """One subject of one candidate. ``examples`` were run and judged, on ``meshes`` distinct meshes; ``rejected`` were
    refused by the candidate; ``stopped`` says why fewer ran than were asked for. The first fault was found after
    ``found_after`` examples; the rest of them shrank it. ``refusals``: the candidate's reasons, and how often each was
    given. Seconds of wall time."""

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
    seed: int
    rows: tuple[Row, ...]
    seconds: float
    libraries: dict[str, str] = field(default_factory=dict)


Event: TypeAlias = RunStarted | CandidateDescribed | SubjectStarted | CaseJudged | SubjectDone | RunDone
Listener: TypeAlias = Callable[[Event], None]
