"""The training on a rank: some steps at a time, so that the parent can follow and tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.find import Spec
from harness.local import Purity
from harness.mixed_precision_steps import MOVED, SEEN
from harness.observation import Observation
from harness.train_step_run import Run, builder
from harness.world import RankContext
from reference.train_step import TrainStepCase

#: Where a rank keeps what it trains between jobs.
_RUN = "training"


@dataclass(frozen=True)
class Part:
    """Some steps on one rank. seen: losses and norms by the number of the step; decisions and what moved in each, in
    their order. before, after: all that is kept, where it was asked for."""

    seen: Observation
    before: Observation | None = None
    after: Observation | None = None


def begin(context: RankContext, spec: Spec, case: TrainStepCase) -> None:
    """Builds this rank's trainer."""
    run = context.state[_RUN] = Run(case, context.rank, builder(context, spec))
    run.begin()


def go_on(context: RankContext, steps: Sequence[int], whole: bool) -> Part:
    """Makes the next steps. whole: returns all that is kept, too."""
    run: Run = context.state[_RUN]
    purity = Purity()
    before = run.kept() if whole else None
    for step in steps:
        run.step(step)
    after = run.kept() if whole else None
    seen = Observation(
        dict(run.tensors),
        side_effects=tuple(purity.report()),
        facts={SEEN: list(run.seen), MOVED: list(run.moved_in)},
    )
    for kept in (run.tensors, run.seen, run.moved_in):
        kept.clear()
    return Part(seen, before, None if after is None else replace(after, tensors={**seen.tensors, **after.tensors}))


def end(context: RankContext) -> None:
    """Lets go of the trainer."""
    run: Run = context.state.pop(_RUN)
    run.close()
