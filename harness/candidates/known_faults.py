"""Faults of other people's libraries that were shown to be real (docs/findings.md).

A case that meets one is refused, and counted as refused, so that a run can hold for all the rest; ``torch+strict`` runs
these cases too and reports what is found.
"""

from __future__ import annotations

from harness.candidate import Candidate, NotOffered


class WithKnownFaults(Candidate):
    """A candidate with the variant ``strict``."""

    def __init__(self, variant: str | None = None) -> None:
        if variant not in (None, "strict"):
            raise NotOffered(f"{self.name} has no variant {variant!r}: expected {self.name}+strict or {self.name}")
        self.strict = variant == "strict"

    def known_fault(self, what: str) -> None:
        """Refuses the case, unless everything is asked for."""
        if not self.strict:
            raise NotOffered(f"known fault: {what}")
