"""Draws recipes."""

from __future__ import annotations

from hypothesis import strategies as st

from reference.recipe import Recipe

# Mostly random lattice data: zeros hide faults, and are drawn because code may treat them specially.
_EXACT = ("lattice",) * 8 + ("constant_per_rank", "zeros")


def exact_recipes() -> st.SearchStrategy[Recipe]:
    """Recipes whose results are exact in every dtype."""
    return st.builds(Recipe, kind=st.sampled_from(_EXACT), seed=st.integers(0, 99))
