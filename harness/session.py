"""The candidate on a rank: its instances, one a mesh, kept between the cases of a pool."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from harness.candidate import Candidate, NotOffered
from harness.find import Spec, load
from harness.world import RankContext
from reference.mesh import Mesh


class CandidateRaised(Exception):
    """The candidate's own code raised, in the phase that is named: import, open, build, forward, backward."""


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Code inside is the candidate's: whatever it raises is its fault and not the harness'."""
    try:
        yield
    except (NotOffered, CandidateRaised):
        raise
    except BaseException as error:
        text = "".join(traceback.format_exception(error)).rstrip()
        raise CandidateRaised(f"in {name}: {type(error).__name__}: {error}\n{text}") from None


class Session:
    """The candidate's instances on this rank. Every rank makes the same calls in the same order."""

    def __init__(self, spec: Spec) -> None:
        with phase("import"):
            self.kind = load(spec)
        self.variant = spec.variant
        self._open: dict[Mesh, Candidate] = {}

    @staticmethod
    def of(context: RankContext, spec: Spec) -> Session:
        """This rank's session for a candidate, made when first asked."""
        session = context.state.get(spec)
        if session is None:
            session = context.state[spec] = Session(spec)
        return session

    def make(self) -> Candidate:
        with phase("construction"):
            return self.kind(self.variant) if self.variant is not None else self.kind()

    def on(self, mesh: Mesh) -> Candidate:
        """The instance for this mesh, opened and active."""
        candidate = self._open.get(mesh)
        if candidate is None:
            candidate = self.make()
            with phase("open"):
                candidate.open(mesh)
            self._open[mesh] = candidate
        with phase("activate"):
            candidate.activate()
        return candidate
