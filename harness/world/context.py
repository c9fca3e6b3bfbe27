"""What a function is told about the rank it runs on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.world.traffic import Recorder


@dataclass(frozen=True)
class RankContext:
    """The first argument of every function that runs on ranks.

    rank, world_size: of the default group, which is initialised. state: kept from job to job as long as these
    processes live, for what is costly to make (groups, candidates). traffic: sees the collectives of this job.
    tell: ``tell(text)`` leaves a text that outlives the rank, in place of the last one: of a job that does not end well
    the `Outcome` has it, where the rank is stuck or dead too.
    """

    rank: int
    world_size: int
    traffic: Recorder
    tell: Callable[[str], None]
    state: dict[Any, Any] = field(default_factory=dict)


class _Here:
    """This process, if it is a rank or was forked from one."""

    rank: int | None = None
    pid: int | None = None
    importing: bool = False


def enter_rank(rank: int) -> None:
    """Marks this process as a rank."""
    _Here.rank, _Here.pid = rank, os.getpid()


def this_rank() -> int | None:
    """The rank that this process is, or was forked from; None in every other process."""
    return _Here.rank


def is_rank() -> bool:
    """Whether this process is a rank itself, and no child that a job forked: that has no word in what ranks say."""
    return _Here.pid == os.getpid()


@contextmanager
def importing_for_ranks() -> Iterator[None]:
    """This process imports a user's modules so that ranks have them."""
    _Here.importing = True
    try:
        yield
    finally:
        _Here.importing = False


def imports_for_ranks() -> bool:
    """Whether a user's module is being imported for ranks: what it starts at import would import it again."""
    return _Here.importing
