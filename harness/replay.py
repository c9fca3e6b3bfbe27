"""Runs one reproducer again, in new processes."""

from __future__ import annotations

import math
from dataclasses import replace

from harness.bench import Bench, raced
from harness.case_file import Reproducer
from harness.errors import WrongUse
from harness.properties import property_of
from harness.verdict import Verdict
from harness.verification import require_deadline, require_world
from harness.world.limits import available_memory
from reference.linear import LinearCase
from reference.mesh import MeshCase
from reference.schedule import ScheduleCase

_GIB = 1 << 30
_BEYOND = 1 << 200  # any text may ask for more than a float can say
_NUMBER = 8  # bytes: float64, int64
_MOST_TOKEN_DIMS = 4  # that a candidate may declare
_NUMBERS_A_STEP = 100  # of a schedule: a forward, a backward and their messages, as objects and in tables
_GROUPINGS = 13  # of a mesh: five axes, six combinations, two special


class CaseTooLarge(WrongUse):
    """A case whose tensors do not fit into the memory of this machine, or have more dimensions than any candidate's."""


def replay(reproducer: Reproducer, *, deadline: float = 30.0) -> Verdict:
    """The verdict on the case, from fresh processes. A case that holds is tried with delays too: where it fails with
    them, the fact ``delays`` is their seed.

    Raises CandidateUnusable, UnknownCandidate, WorldTooLarge, CaseTooLarge or another WrongUse where it cannot run.
    """
    subject, case = property_of(reproducer.subject), reproducer.case
    require_deadline(deadline)
    world = subject.world(case)
    require_world(world)
    require_memory(case, world)
    with Bench(reproducer.candidate, deadline=deadline) as bench:
        most = bench.description.largest_mesh
        if case.mesh.size > max(world, most):
            return Verdict(
                rejected=f"the mesh has {case.mesh.size} ranks, the candidate computes groups of up to {most}"
            )
        trial = bench.check(subject, case, reproducer.delays)
        if trial.verdict.findings or trial.verdict.rejected is not None or world == 1:
            return trial.verdict
        for late in raced(bench, subject, case, reproducer.delays):
            return replace(late.verdict, facts={**late.verdict.facts, DELAYS: late.delays})
        return trial.verdict


#: The fact of a verdict that delays made.
DELAYS = "delays"


def require_memory(case: object, world: int) -> None:
    """Raises CaseTooLarge, before anything is allocated, for what is far beyond the sizes that are drawn.

    Text can ask for any size, and what is too large would end as an exception in the reference, or as ranks that the
    system kills, as if the candidate were to blame.
    """
    match case:
        case LinearCase():
            sizes = f"in_features {case.in_features}, out_features {case.out_features}, leading {case.leading}"
            dims = max(map(len, case.leading))
            if dims > _MOST_TOKEN_DIMS:
                raise CaseTooLarge(f"leading has {dims} dimensions: expected at most {_MOST_TOKEN_DIMS}")
            tokens = sum(map(math.prod, case.leading))
            weights = case.in_features * case.out_features * (1 + case.replicas)
            given = weights + 2 * case.replicas * tokens * (case.in_features + case.out_features)
        case MeshCase():
            sizes = f"mesh {case.mesh}"
            given = _GROUPINGS * case.mesh.size
        case ScheduleCase():
            sizes = f"stages {case.stages}, chunks {case.chunks}, micro_batches {case.micro_batches}"
            given = _NUMBERS_A_STEP * case.stages * case.chunks * case.micro_batches
        case _:
            return
    # Every rank makes the global tensors, as the reference does; filling and comparing hold some copies more.
    needed, available = given * _NUMBER * (world + 3), available_memory()
    if available is not None and needed > available:
        raise CaseTooLarge(
            f"the case needs about {min(needed, _BEYOND) / _GIB:.3g} GiB of memory ({_short(sizes)}), and "
            f"{available / _GIB:.3g} GiB are available: make its sizes smaller or use a larger machine"
        )


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
