"""Small sleeps before collectives on some ranks: they bring out code that reads a result before it is there.

A right result does not depend on who comes late.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Literal

#: Which cases get delays: ``some`` are one of eight.
Which = Literal["none", "some", "all"]
_ONE_IN = 8

#: Seconds. Long beside a collective of small tensors, 0.1 to 1 ms, and short beside a case.
LONGEST = 0.02


@dataclass(frozen=True)
class Delays:
    """Which ranks sleep before which of their collectives, and how long: decided by ``seed``, nothing for 0. About half
    of the ranks are late, each before about half of its collectives."""

    seed: int = 0

    def before(self, rank: int, number: int) -> float:
        """Seconds that the rank sleeps before its collective of that number."""
        if not self.seed or random.Random(f"{self.seed} {rank}").random() < 0.5:
            return 0.0
        chosen = random.Random(f"{self.seed} {rank} {number}")
        return 0.0 if chosen.random() < 0.5 else chosen.uniform(0, LONGEST)


def chosen(which: Which, case: str) -> int:
    """The seed of a case's delays, or 0: decided by its JSON, so that the same case has the same ones everywhere."""
    number = int.from_bytes(hashlib.blake2b(case.encode(), digest_size=8).digest())
    return 0 if which == "none" or (which == "some" and number % _ONE_IN) else 1 + number // _ONE_IN % 10**6
