"""What the pure tests draw."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

import strategies.linear
import strategies.transformer
from reference.layout import Each, Layout, Partial, Placement, Split, Whole
from reference.linear import LinearCase, LinearRecipes
from reference.mesh import AXES, Mesh
from reference.recipe import EXACT_KINDS, Recipe
from strategies.mesh import meshes
from strategies.scope import Scope

#: Everything that may be drawn.
FULL = Scope(
    max_world=8,
    parts=frozenset({"column_linear", "row_linear", "group", "group_ranks"}),
    features=frozenset(strategies.linear.FEATURES),
    checks_initialization=True,
)


def _made_exact(case: LinearCase) -> LinearCase:
    kinds = {f.name: getattr(case.recipes, f.name) for f in dataclasses.fields(case.recipes)}
    exact = {
        name: Recipe(recipe.kind if recipe.kind in EXACT_KINDS else "lattice", recipe.seed)
        for name, recipe in kinds.items()
    }
    return dataclasses.replace(case, recipes=LinearRecipes(**exact))


#: Linear cases in which nothing rounds and everything is finite.
exact_linear_cases = strategies.linear.cases(FULL).map(_made_exact)

#: Transformer layers that have expected values.
transformer_cases = strategies.transformer.cases(
    Scope(max_world=8, features=frozenset(strategies.transformer.FEATURES) - {"transformer_dropout"})
)

small_meshes = meshes(AXES, 24, most=len(AXES))


@cache
def sample(strategy: st.SearchStrategy[Any], count: int = 1000) -> tuple[Any, ...]:
    """The same cases every time, whatever the profile."""
    drawn: list[Any] = []

    @hypothesis.seed(0)
    @hypothesis.settings(max_examples=count, database=None, derandomize=False, phases=[hypothesis.Phase.generate])
    @hypothesis.given(strategy)
    def collect(case: Any) -> None:
        drawn.append(case)

    collect()
    return tuple(drawn)


@dataclass(frozen=True)
class Cut:
    """A global tensor of distinct values and the way it is cut."""

    mesh: Mesh
    layout: Layout
    values: NDArray[np.float64]

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes that no placement names."""
        parts = self.layout if isinstance(self.layout, tuple) else (self.layout,)
        named = {axis for p in parts if not isinstance(p, Whole) for axis in _axes(p)}
        return tuple(name for name in self.mesh.names if name not in named)


@st.composite
def cuts(draw: st.DrawFn, partial: bool = False, smallest: int = 0, copies: bool = False) -> Cut:
    """A tensor over a mesh, each of whose axes splits, lists, sums (where ``partial``) or replicates.

    ``smallest`` is the least length of a dimension; with ``copies`` every part is on several ranks.
    """
    mesh = draw(small_meshes)
    if copies:
        others = [(name, size) for name, size in mesh.axes if name != "dp"]
        others.insert(draw(st.integers(0, len(others))), ("dp", draw(st.integers(2, 3))))
        mesh = Mesh(tuple(others))
    shape = draw(st.lists(st.integers(smallest, 7), min_size=1, max_size=3))
    each: list[Placement] = []
    cutting: list[Placement] = []
    listed: list[int] = []
    for axis in draw(st.permutations([name for name in mesh.names if not (copies and name == "dp")])):
        role = draw(st.sampled_from(["split", "each", "replica", *["partial"] * partial]))
        if role == "split":
            dim = draw(st.integers(-len(shape), len(shape) - 1))
            cutting.append(Split(dim, axis, rule=draw(st.sampled_from(["balanced", "chunk"]))))
        elif role == "partial":
            cutting.append(Partial((axis,)))
        elif role == "each":
            each.append(Each(axis))
            listed.append(mesh.axis_size(axis))
    parts: tuple[Placement, ...] = (*cutting, *each)
    whole = (*listed, *shape)
    values = np.arange(1.0, 1.0 + np.prod(whole, dtype=int)).reshape(whole)
    return Cut(mesh, parts[0] if len(parts) == 1 else parts or Whole(), values)


def _axes(placement: Split | Partial | Each) -> tuple[str, ...]:
    return (placement.axis,) if isinstance(placement.axis, str) else placement.axis
