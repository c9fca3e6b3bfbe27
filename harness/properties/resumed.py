"""A state that is saved and loaded: the run goes on with the bits that it has without, and who saved goes on too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.properties.base import World
from harness.properties.tensors import other_bits
from harness.saved import APART
from harness.verdict import Finding
from reference.mesh import Mesh


def judge_resumed(mesh: Mesh, load: int, worlds: Sequence[World]) -> Iterator[Finding]:
    """What differs from the run without an interruption, where there is one; and what differs between who loaded and
    who saved, after the step before which that was. load: its number."""
    if len(worlds) > 1:
        yield from other_bits(mesh, worlds, f"after saving and loading at step {load}")
    for rank, one in enumerate(worlds[0]):
        apart = one.facts.get(APART)
        if apart:
            place = mesh.describe(rank)
            message = (
                f"{', '.join(apart)} after step {load} {'is' if len(apart) == 1 else 'are'} other where the state was "
                f"loaded before it than where it was saved, on {place}: saving changed something, or the state lacks it"
            )
            yield Finding("mismatch", message, rank, place, apart[0])
            return
