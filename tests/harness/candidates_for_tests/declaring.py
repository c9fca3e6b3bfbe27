"""Candidates that declare nonsense, and what is no candidate."""

from __future__ import annotations

from right import Right


class UnknownFeature(Right):
    supports = ("gather_output", "teleportation")


class UnknownDtype(Right):
    dtypes = ("fp32", "fp8")


class UnknownAxis(Right):
    axes = ("tp", "fsdp")


class OneString(Right):
    dtypes = "fp32"


class UnknownCut(Right):
    uneven = "left"  # type: ignore[assignment]


class NoTokens(Right):
    token_dims = (0,)


class NoMesh(Right):
    largest_mesh = 0


class Missing(Right):
    requires = ("no-such-distribution",)


class HalfOnly(Right):
    dtypes = ("fp16",)


class NoCandidate:
    """Not a subclass of Candidate."""
