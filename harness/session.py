"""The candidate on a rank: its instances, one a mesh, kept between the cases of a pool."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from harness.candidate import Candidate, NotOffered
from harness.errors import WrongUse
from harness.find import Spec, load
from harness.world import RankContext
from harness.world.traffic import Recorder
from reference.mesh import Mesh


class CandidateRaised(Exception):
    """The candidate's own code raised. The message starts with the phase: ``in forward: ValueError: why``."""


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Code inside is the candidate's: whatever it raises is its fault and not the harness'."""
    try:
        yield
    except (NotOffered, CandidateRaised, WrongUse):
        raise
    except BaseException as error:
        raise CandidateRaised(f"in {name}: {_say(error)}\n{_traceback(error)}".rstrip()) from None


def _say(error: BaseException) -> str:
    """The exception as the last line of a traceback, with its notes."""
    try:
        text = str(error)
    except Exception as second:
        text = f"(its message raises {type(second).__name__})"
    notes = getattr(error, "__notes__", ())
    return "\n".join([f"{type(error).__name__}: {text}" if text else type(error).__name__, *map(str, notes)])


def _traceback(error: BaseException) -> str:
    """The frames from the candidate's first one on, without the last line, which is said already."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame):
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    if not isinstance(error, SyntaxError):  # whose last lines show the place
        last = traceback.format_exception_only(error)
        lines = lines[: -len(last)] if lines[-len(last) :] == last else lines
    return "".join(lines).rstrip()


def _is_ours(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__"))
    adapter = module.startswith("harness.candidates.")
    return (module.startswith("harness.") and not adapter) or frame.f_code.co_filename.startswith("<frozen importlib")


class Session:
    """The candidate's instances on this rank. Every rank makes the same calls in the same order."""

    def __init__(self, spec: Spec, traffic: Recorder | None = None) -> None:
        self.traffic = traffic
        with phase("import"):
            self.kind = load(spec)
        self.variant = spec.variant
        self._open: dict[Mesh, Candidate] = {}

    @staticmethod
    def of(context: RankContext, spec: Spec) -> Session:
        """This rank's session for a candidate, made when first asked."""
        session = context.state.get(spec)
        if session is None:
            session = context.state[spec] = Session(spec, context.traffic)
        return session

    def make(self) -> Candidate:
        with phase("construction"):
            return self.kind(self.variant) if self.variant is not None else self.kind()

    def on(self, mesh: Mesh) -> Candidate:
        """The instance for this mesh, opened and active. Collectives are counted from here on: the same case has the
        same numbers, and the same delays, in processes that have opened the mesh before and in fresh ones."""
        candidate = self._open.get(mesh)
        if candidate is None:
            candidate = self.make()
            with phase("open"):
                candidate.open(mesh)
            self._open[mesh] = candidate
        with phase("activate"):
            candidate.activate()
        if self.traffic is not None:
            self.traffic.clear()
        return candidate
