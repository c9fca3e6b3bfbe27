"""Independent draws for Hypothesis: a backend named ``shardproof``.

By default Hypothesis fills up to five of six examples by copying parts of the example before, and mixes in constants
that it finds in the sources of "local" modules. The first hides combinations of options: of 100 linear cases as few as
16 were row layers, none of which could show a wrong bias gradient. The second makes the same seed draw other cases from
a checkout than from an installed package. With this backend every example is drawn afresh, from the seed alone, unless
`harness.steering` says near which one it is to be; shrinking is Hypothesis' own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

from harness import steering

BACKEND = "shardproof"


class IndependentProvider(HypothesisProvider):
    """Hypothesis' own distributions without constants from source code; made anew for every case."""

    _plan: steering.Plan | None = None

    def _maybe_draw_constant(self, *args: Any, **kwargs: Any) -> None:
        return None

    @contextlib.contextmanager
    def per_test_case_context_manager(self) -> Iterator[None]:
        by, data = steering.current(), self._cd
        if by is None or data is None:
            yield
            return
        assert self._random is not None
        self._plan = by.neighbour(self._random)
        yield  # a case that fails or is rejected raises here
        by.learn(data.nodes, data.target_observations)

    # Cases are drawn by integers and booleans only: strings and the like would not be kept in a neighbour.

    def draw_integer(self, min_value: int | None = None, max_value: int | None = None, **more: Any) -> int:
        def fresh() -> int:
            return HypothesisProvider.draw_integer(self, min_value, max_value, **more)

        if self._plan is None:
            return fresh()
        return self._plan.draw("integer", {"min_value": min_value, "max_value": max_value, **more}, fresh)

    def draw_boolean(self, p: float = 0.5) -> bool:
        def fresh() -> bool:
            return HypothesisProvider.draw_boolean(self, p)

        return fresh() if self._plan is None else self._plan.draw("boolean", {"p": p}, fresh)


def register() -> str:
    """Makes the backend known to Hypothesis, once, and returns its name for ``settings(backend=...)``."""
    AVAILABLE_PROVIDERS.setdefault(BACKEND, f"{__name__}.{IndependentProvider.__name__}")
    return BACKEND
