"""What came of a training, as plain data: for the table, the picture and the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.verdict import Finding
from reference.train_step import TrainStepCase


@dataclass(frozen=True)
class Number:
    """A loss or a norm: of the ranks, of one process, and by how much rounding alone may make them differ; inf where
    rounding decides everything. share: the difference over it, which fails above 1."""

    ranks: float
    process: float
    tolerance: float
    share: float

    @property
    def difference(self) -> float:
        return abs(self.ranks - self.process)


@dataclass(frozen=True)
class Step:
    """A step of both. scale: by which its loss was multiplied; skipped: whether it was; both of the first rank, and
    ``process_`` those of one process. decided: whether rounding had no say in that: if it had, one process did as the
    ranks. norm: None where the step is skipped, or the candidate says none."""

    step: int
    loss: Number
    norm: Number | None
    scale: float
    skipped: bool
    process_scale: float
    process_skipped: bool
    decided: bool


@dataclass(frozen=True)
class Look:
    """A step that one process made again from all that the ranks had before it. share: of the farthest element of all
    that they had after it, over its tolerance. loss: of both, None where nothing could be compared."""

    step: int
    share: float
    loss: Number | None = None


@dataclass(frozen=True)
class Trained:
    """A training in a dtype. findings: those of the first step in which something is wrong, ``wrong_at``; None for what
    belongs to no step. case: None, as refused says why, where the candidate does not train. no_looks: why there are no
    looks. seconds: wall time."""

    candidate: str
    dtype: str
    case: TrainStepCase | None = None
    steps: Sequence[Step] = ()
    looks: Sequence[Look] = ()
    findings: Sequence[Finding] = ()
    wrong_at: int | None = None
    refused: str | None = None
    no_looks: str | None = None
    seconds: float = 0.0

    @property
    def held(self) -> bool:
        return not self.findings and self.refused is None

    @property
    def undecided(self) -> int:
        """The steps in which one process did as the ranks."""
        return sum(not one.decided for one in self.steps)


def exit_code(runs: Sequence[Trained]) -> int:
    """0 all hold; 1 a fault of the candidate; 2 one of ours; 3 nothing ran, or not all."""
    kinds = [one.findings[0].kind for one in runs if one.findings]
    if "harness" in kinds:
        return 2
    return 1 if kinds else 3 if any(one.refused is not None for one in runs) else 0
