"""Draws recipes."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from reference.recipe import INJECTIONS, Recipe

# Mostly random lattice data: zeros hide faults, and are drawn because code may treat them specially.
_EXACT = ("lattice",) * 8 + ("constant_per_rank", "zeros")
_ROUNDING = ("normal",) * 3 + ("uniform", "spiky", "cancelling") * 2 + ("lattice", "zeros")
#: At the ends of the format: of these, one tensor in a case is enough. Not in fp64, beyond whose ends the reference, in
#: float64 too, can compute no tolerance.
_EXTREME = ("subnormal", "near_overflow")

_seeds = st.integers(0, 99)


@st.composite
def recipes(draw: st.DrawFn, tensors: int, dtype: str, exact: bool = True) -> tuple[Recipe, ...]:
    """One recipe a tensor: for two cases of three all exact, else of data that rounds. In one of five or more, one
    tensor has an infinity or NaN in one place, or lies at an end of the format. exact: False for data that rounds in
    every case."""
    rounding = not exact or draw(st.integers(0, 2)) == 2
    kinds = st.sampled_from(_ROUNDING if rounding else _EXACT)
    made = [draw(st.builds(Recipe, kind=kinds, seed=_seeds)) for _ in range(tensors)]
    ends = _EXTREME if rounding and dtype != "fp64" else ()
    special = draw(st.sampled_from([*[None] * 4, "inject", *ends]))
    if special is not None:
        which = draw(st.integers(0, tensors - 1))
        if special == "inject":
            inject, at = draw(st.sampled_from(sorted(INJECTIONS))), draw(st.integers(0, 99))
            made[which] = dataclasses.replace(made[which], inject=inject, at=at)
        else:
            made[which] = dataclasses.replace(made[which], kind=special)
    return tuple(made)
