"""Candidates that declare nonsense, and what is no candidate."""

from __future__ import annotations

from typing import Any

from right import Right


class UnknownFeature(Right):
    supports = ("gather_output", "teleportation")


class UnknownDtype(Right):
    dtypes = ("fp32", "fp8")


class UnknownAxis(Right):
    axes = ("tp", "fsdp")


class NoAxis(Right):
    axes = ()


class OtherAxes(Right):
    axes = ("dp", "pp")


class OneString(Right):
    dtypes = "fp32"


class NoStrings(Right):
    supports = None  # type: ignore[assignment]


class UnknownCut(Right):
    uneven = "left"  # type: ignore[assignment]


class NoTokens(Right):
    token_dims = (0,)


class OneNumber(Right):
    token_dims = 2  # type: ignore[assignment]


class NoMesh(Right):
    largest_mesh = 0


class NoNumber(Right):
    meshes_at_once = "one"  # type: ignore[assignment]


class Raises(Right):
    @property
    def axes(self) -> Any:
        raise KeyError("axes")


class Missing(Right):
    requires = ("no-such-distribution",)


class HalfOnly(Right):
    dtypes = ("fp16",)


class NoCandidate:
    """Not a subclass of Candidate."""
