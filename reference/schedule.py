"""Pipeline schedules: the case, and lists of actions of any origin, as data.

Stages are numbered along the model. Where nothing else is said, chunk c of rank r is stage ``c * p + r`` of p ranks
(arXiv 2104.04473, section 2.2). A V-shaped schedule lets every second chunk run backwards through the ranks
(arXiv 2401.10241, section 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeGuard, get_args

import numpy as np
from numpy.typing import NDArray

from reference.mesh import Mesh

ScheduleKind = Literal["gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev"]
#: Those whose stages are placed in a V, two a rank.
V_SHAPED = ("zbv", "dualpipev")

ActionKind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "recv_forward",
    "send_forward",
    "recv_backward",
    "send_backward",
]
ACTION_KINDS: tuple[ActionKind, ...] = get_args(ActionKind)
#: By position in `ACTION_KINDS`.
F, B, BI, BW, RF, SF, RB, SB = range(len(ACTION_KINDS))

#: How a list's receives are meant: a receive waits for its message; it is only posted, and what computes with the
#: message waits; or the lists say only what is computed.
Receives = Literal["wait", "posted", "none"]

Array = NDArray[np.int64]
#: The stage of every chunk of every rank.
Placement = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ScheduleCase:
    """A schedule that is asked for: its kind, p = ``stages`` ranks, v = ``chunks`` stages on each, m micro-batches.

    Raises ValueError for a count below 1, for 1F1B with several chunks, and for a V-shaped kind without two.
    """

    kind: ScheduleKind
    stages: int
    micro_batches: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise ValueError(f"unknown schedule {self.kind!r}: expected one of {', '.join(get_args(ScheduleKind))}")
        for name in ("stages", "micro_batches", "chunks"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{name} is {count!r}: expected a whole number of at least 1")
        if self.kind == "1f1b" and self.chunks != 1:
            raise ValueError(f"1f1b has one chunk a rank, not {self.chunks}: take interleaved, or gpipe, for several")
        if self.kind in V_SHAPED and self.chunks != 2:
            raise ValueError(f"{self.kind} has two chunks a rank, not {self.chunks}")

    @property
    def mesh(self) -> Mesh:
        """The ranks of the schedule; none of them is started."""
        return Mesh((("pp", self.stages),))

    @property
    def placement(self) -> Placement:
        """The usual one for the kind."""
        return v_shaped(self.stages) if self.kind in V_SHAPED else looped(self.stages, self.chunks)


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank on one of its chunks.

    ``backward_input`` and ``backward_weight`` are a backward in two parts: the gradient for the stage before, and that
    of the parameters. ``recv_forward`` and ``send_backward`` are of the border to the stage before, ``send_forward``
    and ``recv_backward`` of that to the stage after.
    """

    kind: ActionKind
    micro_batch: int
    chunk: int = 0


def looped(stages: int, chunks: int) -> Placement:
    """Chunk c of rank r is stage c * p + r."""
    return tuple(tuple(chunk * stages + rank for chunk in range(chunks)) for rank in range(stages))


def v_shaped(stages: int) -> Placement:
    """Rank r has stage r, and stage 2p - 1 - r."""
    return tuple((rank, 2 * stages - 1 - rank) for rank in range(stages))


@dataclass(frozen=True, eq=False)
class Lists:
    """Lists of actions, one a rank, as numbers.

    actions: for each rank [actions, 3]: the kind as an index of `ACTION_KINDS`, the chunk, the micro-batch; the numbers
        may be any. placement: the stage of each chunk of each rank, every stage once.
    """

    micro_batches: int
    placement: Placement
    actions: tuple[Array, ...]
    receives: Receives = "wait"

    @property
    def ranks(self) -> int:
        return len(self.placement)

    @property
    def chunks(self) -> int:
        return len(self.placement[0])

    @property
    def stages(self) -> int:
        """Of the whole model."""
        return self.ranks * self.chunks

    @cached_property
    def rank_of(self) -> Array:
        """[stages]."""
        return np.array([rank for _, rank in sorted((s, r) for r, stages in enumerate(self.placement) for s in stages)])

    def next_is_elsewhere(self) -> NDArray[np.bool_]:
        """[stages]: whether the stage after each is on another rank; not so for the last, which has none."""
        return np.append(self.rank_of[1:] != self.rank_of[:-1], False)


def lists(
    case: ScheduleCase,
    actions: Sequence[Sequence[Action]],
    placement: Placement | None = None,
    receives: Receives = "wait",
) -> Lists:
    """The lists as numbers. Raises ValueError for a kind that there is not, for a placement without every stage, and
    for messages where ``receives`` says that there are none.

    ``actions`` may hold any objects that have the attributes of an `Action`.
    """
    if receives not in get_args(Receives):
        raise ValueError(f"receives is {receives!r}: expected one of {', '.join(get_args(Receives))}")
    placed = case.placement if placement is None else placement
    require_placement(case, placed)
    if len(actions) != case.stages:
        raise ValueError(f"there are {len(actions)} lists: expected one for each of the {case.stages} ranks")
    found = tuple(as_numbers(rank, one) for rank, one in enumerate(actions))
    for rank, one in enumerate(found) if receives == "none" else ():
        for position in np.flatnonzero(np.isin(one[:, 0], (RF, SF, RB, SB)))[:1]:
            raise ValueError(
                f"rank {rank}, position {position}: a {ACTION_KINDS[one[position, 0]]}, although receives is 'none': "
                "say what receives do, or leave messages out of the lists"
            )
    return Lists(case.micro_batches, placed, found, receives)


def as_numbers(rank: int, actions: Sequence[Action]) -> Array:
    """One rank's list, [actions, 3]. Raises ValueError that names rank and position of what is no action."""
    number = {kind: code for code, kind in enumerate(ACTION_KINDS)}
    try:
        rows = [(number[a.kind], a.chunk, a.micro_batch) for a in actions]
        found = np.array(rows, dtype=object).reshape(-1, 3)
        if all(type(x) is int for x in found.flat):
            return found.astype(np.int64)
    except (AttributeError, KeyError, TypeError, OverflowError):
        pass
    for position, action in enumerate(actions):
        kind, *places = (getattr(action, name, None) for name in ("kind", "chunk", "micro_batch"))
        if kind not in ACTION_KINDS or not all(_is_whole(x) and abs(x) < 2**62 for x in places):
            raise ValueError(
                f"rank {rank}, position {position}: {action!r} is no action: expected a kind of "
                f"{', '.join(ACTION_KINDS)}, and a chunk and a micro-batch, whole numbers"
            )
    rows = [(number[a.kind], int(a.chunk), int(a.micro_batch)) for a in actions]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _is_whole(x: object) -> TypeGuard[int]:
    """Whether it is a whole number, one of numpy's too."""
    return isinstance(x, int | np.integer) and not isinstance(x, bool | np.bool_)


def require_placement(case: ScheduleCase, placement: Placement) -> None:
    """Raises ValueError unless every rank has as many stages as chunks, and every stage is there once."""
    if len(placement) != case.stages or any(len(stages) != case.chunks for stages in placement):
        raise ValueError(f"the placement gives {_sizes(placement)}: expected {case.chunks} on each of {case.stages}")
    found = sorted(stage for stages in placement for stage in stages)
    if found != list(range(case.stages * case.chunks)):
        raise ValueError(
            f"the placement has stages {found}: expected each of 0 to {case.stages * case.chunks - 1} once"
        )


def _sizes(placement: Placement) -> str:
    sizes = sorted({len(stages) for stages in placement})
    return f"{' or '.join(map(str, sizes))} stages to each of {len(placement)} ranks"
