"""What the proposals of simpler cases of all subjects have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from reference.recipe import Recipe
from strategies.scope import Scope

Case = TypeVar("Case", bound=Any)


class Simpler(Generic[Case]):
    """Proposes changes of cases of one kind.

    kind: a frozen dataclass; its fields with a default are options that can be plain, but for the ``sizes`` among them.
    measure: what is simpler has the smaller one. within: whether a case is such as the scope allows. recipe: the
    plainest.
    """

    def __init__(
        self,
        kind: type[Case],
        sizes: tuple[str, ...],
        measure: Callable[[Case], tuple[Any, ...]],
        within: Callable[[Case, Scope], bool],
        recipe: Recipe | None = None,
    ) -> None:
        fields = [f for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING and f.name not in sizes]
        self.plain: dict[str, Any] = {f.name: f.default for f in fields}
        self._measure, self._within = measure, within
        self._recipe = Recipe() if recipe is None else recipe

    def options(self, case: Case) -> dict[str, Any]:
        """Those that are not plain, as they would be."""
        return {name: plain for name, plain in self.plain.items() if getattr(case, name) != plain}

    def recipes(self, case: Case) -> list[str]:
        """The names of the tensors whose recipes are not the plainest."""
        return [f.name for f in dataclasses.fields(case.recipes) if getattr(case.recipes, f.name) != self._recipe]

    def changed(self, case: Case, scope: Scope, **changes: Any) -> Iterator[Case]:
        """The case with these changes; nothing where they do not go together, are no simpler, or beyond the scope."""
        try:
            made = dataclasses.replace(case, **changes)
        except ValueError:
            return
        if self._measure(made) < self._measure(case) and self._within(made, scope):
            yield made

    def plainer(self, case: Case, scope: Scope) -> Iterator[Case]:
        """One option as plain as can be, then all recipes, then one."""
        for name, plain in self.options(case).items():
            yield from self.changed(case, scope, **{name: plain})
        names = self.recipes(case)
        for some in [names, *([name] for name in names)]:
            recipes = dataclasses.replace(case.recipes, **dict.fromkeys(some, self._recipe))
            yield from self.changed(case, scope, recipes=recipes)
