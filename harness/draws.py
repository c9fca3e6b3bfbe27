"""Independent draws for Hypothesis: a backend named ``shardproof``.

By default Hypothesis fills up to five of six examples by copying parts of the example before, and mixes in constants
that it finds in the sources of "local" modules. The first hides combinations of options: of 100 linear cases as few as
16 were row layers, none of which could show a wrong bias gradient. The second makes the same seed draw other cases from
a checkout than from an installed package. With this backend every example is drawn afresh, from the seed alone;
shrinking is Hypothesis' own.
"""

from __future__ import annotations

from typing import Any

from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

BACKEND = "shardproof"


class IndependentProvider(HypothesisProvider):
    """Hypothesis' own distributions without constants from source code."""

    def _maybe_draw_constant(self, *args: Any, **kwargs: Any) -> None:
        return None


def register() -> str:
    """Makes the backend known to Hypothesis, once, and returns its name for ``settings(backend=...)``."""
    AVAILABLE_PROVIDERS.setdefault(BACKEND, f"{__name__}.{IndependentProvider.__name__}")
    return BACKEND
