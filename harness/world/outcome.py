"""What became of a job on its ranks, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["ok", "error", "hang", "crash"]


class NotOk(RuntimeError):
    """The values of a job were asked for, and it has none: a rank raised, died or never finished."""


@dataclass(frozen=True)
class Returned:
    """The rank's function returned; tensors in ``value`` are on the CPU and contiguous."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """The rank's function raised. type_name: ``module.Class``, without ``builtins``. traceback: our frames left out."""

    type_name: str
    message: str
    traceback: str


@dataclass(frozen=True)
class Died:
    """The rank's process ended. code: its exit code, or minus the signal that killed it; description: in words.
    last_collective: as of `Blocked`."""

    code: int
    description: str
    last_collective: str | None = None


@dataclass(frozen=True)
class Blocked:
    """The rank had not finished when its job was given up.

    stack: its Python stacks, most recent call first. last_collective: the last one that it began in this job, for
    example ``all_reduce on group [0, 1], float32, 12 elements, 3rd collective of this rank``; None for none.
    """

    stack: str
    last_collective: str | None


Ending = Returned | Raised | Died | Blocked


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    ranks: one ending a rank. seconds: from the moment the job was with ready ranks to the last ending; for a job that
    is ok, the time of its slowest rank. history: the labels of the jobs that ran before it in the same processes. told:
    what each rank told last with `RankContext.tell`, None for nothing; empty for a job that is ok.
    """

    ranks: tuple[Ending, ...]
    seconds: float
    history: tuple[str, ...] = ()
    told: tuple[str | None, ...] = ()

    @property
    def kind(self) -> Kind:
        """The gravest of the endings: a death is a crash, an exception an error, a rank that never finished a hang."""
        for ending, kind in _GRAVEST_FIRST:
            if any(isinstance(rank, ending) for rank in self.ranks):
                return kind
        return "ok"

    def values(self) -> list[Any]:
        """What each rank's function returned, in the order of ranks. Raises NotOk unless all returned."""
        values = [rank.value for rank in self.ranks if isinstance(rank, Returned)]
        if len(values) != len(self.ranks):
            raise NotOk(f"this job has no values, it ended as {self.kind}: {self}")
        return values

    def __str__(self) -> str:
        return "; ".join(f"rank {number} {_say(rank)}" for number, rank in enumerate(self.ranks))


# A death explains exceptions elsewhere (connections break), and an exception explains ranks that wait for ever.
_GRAVEST_FIRST: tuple[tuple[type[Ending], Kind], ...] = ((Died, "crash"), (Raised, "error"), (Blocked, "hang"))


def _say(rank: Ending) -> str:
    match rank:
        case Returned():
            return "returned"
        case Raised(type_name, message, _):
            return f"raised {type_name}: {message}"
        case Died(_, description, _):
            return description
        case Blocked(_, last_collective):
            return f"never finished (last collective: {last_collective or 'none'})"
