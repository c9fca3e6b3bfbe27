"""One training after another, of one candidate in some dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from harness.bench import Bench, CandidateUnusable
from harness.candidate import NotOffered
from harness.case_file import Reproducer
from harness.errors import WrongUse
from harness.events import Failure
from harness.properties.train_step import TRAIN_STEP
from harness.training.curves import Step, Trained
from harness.training.recipe import Sizes, case_of
from harness.training.training import train
from harness.verdict import Verdict
from harness.verification import require_deadline, require_world
from reference.mesh import Mesh
from reference.text import text
from strategies.train_step import MOST_STEPS, decided

Listener = Callable[[str, Step], object]


def trained(
    candidate: str,
    mesh: Mesh,
    dtypes: Sequence[str],
    sizes: Sizes,
    *,
    seed: int = 0,
    deadline: float = 60.0,
    listen: Listener = lambda dtype, step: None,
) -> list[Trained]:
    """What came of each. deadline: seconds for some steps of the ranks. listen: is told of every step, with the dtype.

    Raises WrongUse, before anything is trained, for what cannot be trained.
    """
    require_deadline(deadline)
    require_world(mesh.size)
    if seed < 0:
        raise WrongUse(f"--seed {seed}: expected from 0")
    try:
        length = len(text().data)
    except ValueError as error:
        raise WrongUse(str(error)) from error
    if sizes.length >= length:
        raise WrongUse(f"--length {sizes.length}: expected less than the {length} bytes of the text")
    for dtype in dtypes:  # what is wrong with the sizes is so for every candidate
        case_of(mesh, dtype, sizes, seed)
    found: list[Trained] = []
    try:
        with Bench(candidate, deadline=deadline) as bench:
            for dtype in dtypes:
                found.append(_one(bench, mesh, dtype, sizes, seed, listen))
    except CandidateUnusable as error:
        return [Trained(candidate, dtype, findings=error.findings) for dtype in dtypes]
    return found


def _one(bench: Bench, mesh: Mesh, dtype: str, sizes: Sizes, seed: int, listen: Listener) -> Trained:
    description = bench.description
    try:
        if not TRAIN_STEP.offered(description):
            raise NotOffered("it has no train_step")
        if dtype not in description.dtypes:
            raise NotOffered(f"it has no {dtype}")
        wide = [name for name, size in mesh.axes if size > 1 and name not in description.axes]
        if wide:
            raise NotOffered(f"it does not cut over {', '.join(wide)}")
        case = case_of(mesh, dtype, sizes, seed, description.supports)
    except NotOffered as refused:
        return Trained(bench.spec.text, dtype, refused=str(refused))
    return train(bench, case, lambda step: listen(dtype, step))


def failure_of(run: Trained) -> Failure:
    """What is wrong with a training that does not hold. What shows in the first steps can be replayed as a case."""
    case = None
    if run.case is not None and run.wrong_at is not None and run.wrong_at < MOST_STEPS:
        short = replace(run.case, steps=run.wrong_at + 1)
        case = short if decided(short) else None
    return Failure(Reproducer(run.candidate, TRAIN_STEP.subject, case), Verdict(tuple(run.findings)))
