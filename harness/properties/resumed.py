"""A state that is saved and loaded: the run goes on with the bits that it has without, and who saved goes on too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from harness.properties.base import World
from harness.properties.tensors import other_bits
from harness.saved import APART
from harness.verdict import Finding
from reference.mesh import Mesh

#: So many names are said of what differs.
_MOST = 3


def some(names: Sequence[str]) -> str:
    """The first of the names, and how many more there are."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


def judge_resumed(
    mesh: Mesh, load: int, worlds: Sequence[World], wrong: Sequence[Finding], anew: bool = False
) -> Iterator[Finding]:
    """What differs from the run without an interruption, where there is one; and what differs between who loaded and
    who saved, after the step before which that was. load: its number. wrong: what is not as one process has it, of
    which the first has a cause or none. anew: whether new processes loaded."""
    where = " in new processes" if anew else ""
    cause = wrong[0].cause if wrong else None
    if len(worlds) > 1:
        others = other_bits(mesh, worlds, f"after saving and loading{where} at step {load}")
        yield from (replace(one, cause=cause) for one in others)
    for rank, one in enumerate(worlds[0]):
        apart = one.facts.get(APART)
        if apart:
            place = mesh.describe(rank)
            why = "the state lacks something, or saving changed it" if wrong else "saving changed something"
            message = (
                f"{why}: after step {load} who saved the state before it, and went on, has other bits than who loaded "
                f"it{where}, on {place}, in {some(apart)}"
            )
            yield Finding("mismatch", message, rank, place, apart[0], cause=cause)
            return
