"""Subject train_step: the shipped trainer on real ranks against one process, its planted faults, and their causes."""

from __future__ import annotations

import datetime
import functools
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from four_ranks import on_four_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import cases, check
from harness.candidates.builtin import Builtin
from harness.observation import Observation
from harness.properties.base import Description
from harness.properties.train_step import TRAIN_STEP
from harness.train_step_run import run
from harness.verdict import Finding
from reference.gpt import GptCase
from reference.loss_scale import Scaling
from reference.mesh import Mesh
from reference.mixed_precision_parts import Overflow
from reference.train_step import TrainStepCase
from sharded import mutants

MODEL = GptCase(Mesh.of(pp=2, dp=2), 5, 4, 1, 1, 2, sizes=(1, 1), length=3, counts=(3, 1, 2), tied=True)
TENSOR = replace(MODEL, mesh=Mesh.of(tp=2, pp=2), heads=2, kv_heads=2, hidden=8, length=4, counts=(4, 1, 2))
DROPS = replace(MODEL, dropout=0.5, hidden=16, recompute="selective")
PLAIN = TrainStepCase(MODEL)
ADAM: dict[str, Any] = {"optimizer": "adamw", "lr": 2.0**-5}
SCALED = Scaling("constant", 4.0)
MOVES = Scaling(initial=2.0**10, growth_interval=2)

#: Each on four ranks.
RIGHT = {
    "everything in fp16": replace(
        PLAIN, model=replace(TENSOR, dtype="fp16", sequence_parallel=True, main_grad=True), steps=3, **ADAM, clip=0.5,
        scaling=MOVES, overflows=(Overflow(1, "nan", ("tp", "pp"), 2),), warmup=4, weight_decay=0.125,
    ),
    "cut over dp, in bf16": replace(
        PLAIN, model=replace(MODEL, dtype="bf16"), steps=3, momentum=0.75, sharded=True, clip=1.0, load=2
    ),
    "copies on one rank": replace(
        PLAIN, model=replace(MODEL, mesh=Mesh.of(dp=4), chunks=2, schedule="interleaved"), steps=2, clip=1.0,
        sharded=True,
    ),
    "apart": replace(PLAIN, steps=3, **ADAM, sharded=True, load=1, resume="apart", clip=1.0),
    "together": replace(
        PLAIN, steps=2, momentum=0.75, load=1, resume="together", overflows=(Overflow(0, axes=("dp",)),)
    ),
    "drops": replace(PLAIN, model=DROPS, steps=3, **ADAM, load=2, overflows=(Overflow(1),), clip=1.0),
    "overflows of itself": replace(
        PLAIN, model=replace(MODEL, dtype="fp16"), steps=3, clip=1.0,
        scaling=Scaling(initial=2.0**32, backoff_factor=2.0**-24, minimum=1.0),
    ),
}  # fmt: skip

#: By mutant, a case that shows it.
SHOWS = {
    "F25d": replace(PLAIN, overflows=(Overflow(axes=("pp",)),)),
    "F26c": replace(PLAIN, steps=2, warmup=4, overflows=(Overflow(),)),
    "F32b": replace(PLAIN, model=TENSOR, clip=1.0),
    "F33b": replace(PLAIN, clip=1.0),
    "F38c": replace(PLAIN, clip=1.0),
    "F46c": PLAIN,
    "F82": replace(PLAIN, scaling=SCALED),
    "F83": replace(PLAIN, scaling=SCALED),
    "F84": replace(PLAIN, scaling=SCALED),
    "F85": PLAIN,
    "F86": replace(PLAIN, steps=2),
    "F87": replace(PLAIN, overflows=(Overflow(axes=("pp",)),)),
    "F88": replace(PLAIN, steps=2, load=1, momentum=0.75),
    "F89": replace(PLAIN, steps=2, load=1),
    "F90": replace(PLAIN, model=replace(TENSOR, chunks=2, schedule="interleaved", sequence_parallel=True)),
    "F91": replace(PLAIN, model=replace(TENSOR, kv_heads=1), clip=1.0),
    "F95": replace(PLAIN, model=DROPS, steps=2, load=1),
}

#: By mutant, a case in which it hides.
HIDES = {
    "F25d": replace(PLAIN, overflows=(Overflow(axes=("dp",)),)),
    "F26c": replace(PLAIN, steps=2, overflows=(Overflow(),)),
    "F32b": PLAIN,
    "F33b": replace(PLAIN, model=replace(MODEL, mesh=Mesh.of(dp=4)), clip=1.0),
    "F38c": PLAIN,
    "F46c": replace(PLAIN, model=replace(MODEL, tied=False)),
    "F82": PLAIN,
    "F83": PLAIN,
    "F84": PLAIN,
    "F85": replace(PLAIN, model=TENSOR),
    "F86": PLAIN,
    "F87": replace(PLAIN, overflows=(Overflow(),)),
    "F88": replace(PLAIN, steps=2, load=1),
    "F89": replace(PLAIN, steps=2),
    "F90": replace(PLAIN, model=replace(TENSOR, sequence_parallel=True)),
    "F91": replace(PLAIN, model=TENSOR, clip=1.0),
    "F95": replace(PLAIN, model=DROPS, steps=2),
}

#: What is said of some of them.
CAUSES = {
    "F26c": "steps that are skipped counted for the learning rate",
    "F38c": "both copies of the tied embedding counted in the norm",
    "F82": "the loss scale were not divided out",
    "F83": "the loss scale were divided out twice",
    "F85": "gradients were averaged over dp",
    "F86": "gradients of the step before were still there",
    "F88": "moments began anew at step 1",
}


def _rank(rank: int, wanted: Sequence[tuple[TrainStepCase, str | None]], path: str, results: Any) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    opened: dict[Mesh, Builtin] = {}
    try:
        dist.init_process_group("gloo", store=dist.FileStore(path, 4), rank=rank, world_size=4, timeout=limit)

        def build(asked: TrainStepCase) -> object:
            if asked.mesh not in opened:
                opened[asked.mesh] = Builtin()
                opened[asked.mesh].open(asked.mesh)
            opened[asked.mesh].activate()
            return opened[asked.mesh].train_step(asked)

        found: Any = []
        for case, mutant in wanted:
            with mutants.applied(mutant) if mutant else nullcontext():
                worlds = TRAIN_STEP.runs(case, Description("builtin", "builtin"))
                found.append([run(one, rank, build) for one in worlds])
    except BaseException:
        found = traceback.format_exc()
    results.put((rank, found))


def judged(wanted: Sequence[tuple[TrainStepCase, str | None]]) -> list[tuple[Finding, ...]]:
    """What is found in each case, with a mutant or without, all in one world of four ranks."""
    seen = on_four_ranks(_rank, wanted)
    expected = functools.cache(TRAIN_STEP.expected)
    verdicts = []
    for i, (case, _) in enumerate(wanted):
        worlds: list[list[Observation]] = [
            list(world) for world in zip(*(seen[rank][i] for rank in range(4)), strict=True)
        ]
        verdicts.append(TRAIN_STEP.judge(case, Description("b", "b"), expected(case), worlds).findings)
    return verdicts


def test_it_is_one_process_and_faults_show() -> None:
    wanted: list[tuple[TrainStepCase, str | None]] = [(case, None) for case in RIGHT.values()]
    wanted += [(case, mutant) for mutant, case in HIDES.items()]
    bad: list[tuple[TrainStepCase, str | None]] = [(case, mutant) for mutant, case in SHOWS.items()]
    found = judged([*wanted, *((case, None) for case in dict.fromkeys(SHOWS.values())), *bad])
    for (case, mutant), findings in zip(wanted, found, strict=False):
        assert not findings, f"{mutant} in {case}: {findings[0].message}"
    for case, findings in zip(dict.fromkeys(SHOWS.values()), found[len(wanted) : -len(bad)], strict=True):
        assert not findings, f"{case}: {findings[0].message}"
    shown = dict(zip(SHOWS, found[-len(bad) :], strict=True))
    for mutant, findings in shown.items():
        assert findings, f"{mutant} hides in {SHOWS[mutant]}"
    for mutant, cause in CAUSES.items():
        assert cause in str(shown[mutant][0].cause), f"{mutant}: {shown[mutant][0]}"
    for mutant in ("F25d", "F87"):
        assert shown[mutant][0].kind == "disagree"
        assert "the decision to skip the step" in shown[mutant][0].message


def test_every_mutant_is_here() -> None:
    own = {mutant.id for mutant in mutants.all_mutants() if mutant.subject == "train_step"}
    in_other_processes = {"F96"}  # tests/test_relaunch.py
    assert own - in_other_processes == set(SHOWS) == set(HIDES)


@settings(max_examples=2)
@given(data=st.data())
def test_training_is_that_of_one_process(data: st.DataObject) -> None:
    check("train_step", "builtin", data.draw(cases("train_step", "builtin", max_world=4)))
