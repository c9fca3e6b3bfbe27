"""The last step of shrinking, with knowledge of the subject.

Hypothesis changes one draw at a time, so it cannot go from three ranks and four features to two ranks and three. A
subject proposes simpler cases, the simplest first, and the first that fails in the same way takes the place of the old.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

Case = TypeVar("Case")


def polish(
    case: Case, simpler: Callable[[Case], Iterable[Case]], fails: Callable[[Case], bool], seconds: float
) -> Case:
    """The simplest case that fails, found within so many seconds; the case itself where nothing simpler does.

    ``simpler`` must propose only cases that are simpler by some measure that decreases, so that this ends.
    """
    ends = time.monotonic() + seconds
    while True:
        for proposal in simpler(case):
            if time.monotonic() > ends:
                return case
            if fails(proposal):
                case = proposal
                break
        else:
            return case
