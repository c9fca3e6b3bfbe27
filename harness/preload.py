"""What the rank server imports once, before the ranks are forked from it."""

from __future__ import annotations

from collections.abc import Iterable

from harness.find import Spec

#: What every rank needs.
OURS = ("harness.properties", "harness.describe")


def modules(specs: Iterable[Spec]) -> tuple[str, ...]:
    """Our own modules and those of the candidates; files are left to the ranks."""
    return (*OURS, *dict.fromkeys(spec.module for spec in specs if not spec.module.endswith(".py")))
