"""The shipped pipeline on ranks: gradients of one process, what is in flight, recomputation, failures, and faults."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_parts import Part, Steps, pipeline_of, problems_of
from sharded_ranks import Check, run_world
from test_sharded_mutants import with_fault

from reference import schedule_formulas
from reference.schedule import ScheduleCase, lists
from reference.schedule_run import Run
from reference.schedule_run import run as simulated
from reference.schedule_tables import Tables
from sharded import mutants
from sharded.pipeline import StageFailed
from sharded.pipeline_agreement import Declared
from sharded.pipeline_batch import cut_batch, deal
from sharded.pipeline_border import HEADER, Border, Form, Label

SEVERAL = {"several": True}
TWO, LONG = {"chunks": 2, "schedule": "interleaved"}, {"sizes": (1, 2, 1, 3, 1)}


def rights(n: int) -> dict[str, Steps]:
    """By name, on n ranks."""
    last = n - 1
    found = {
        f"{kind} of {len(sizes)}": Steps(kind, sizes=sizes)
        for kind, sizes in itertools.product(("gpipe", "1f1b"), ((1,), (2, 1, 1), (1, 1, 2, 1, 3)))
    }
    found |= {f"interleaved of {m}": Steps("interleaved", 2, (1,) * (m - 1) + (2,)) for m in (1, n, n + 1, 2 * n)}
    found |= {f"three chunks, {kind}": Steps(kind, 3, (1, 2, 1)) for kind in ("gpipe", "interleaved")}
    found |= {
        "several": Steps(several=True),
        "several, chunks": Steps(several=True, **TWO),
        "several, recomputed": Steps(several=True, options={"recompute": True}),
        "tied": Steps(tied=(0, last)),
        "tied, chunks": Steps(tied=(0, n), **TWO),
        "tied on all": Steps(tied=tuple(range(n))),
        "tied, accumulated": Steps(tied=(0, last), steps=2, zeroed=False),
        "tied, zeroed": Steps(tied=(0, last), steps=2),
        "tied and frozen": Steps(tied=(0, last), frozen=(0, last) if n > 2 else (0, 1), chunks=2, schedule="gpipe"),
        "frozen": Steps(frozen=(0,)),
        "empty": Steps(empty=(last,), several=True),
        "empty in the middle": Steps(empty=(1,), **TWO),
        "accumulated": Steps(steps=2, zeroed=False),
        "sum": Steps(loss="sum"),
        "measured": Steps(options={"measure": True}, several=True),
    }
    return found


def recomputed_problems(steps: Steps, group: dist.ProcessGroup) -> list[str]:
    """Gradients with dropout, recomputed and stored, and where the random numbers go on."""
    seen = []
    for recompute in (False, True):
        torch.manual_seed(group.rank())
        pipeline, parts = pipeline_of(steps, group, recompute=recompute)
        for step in range(2):
            pipeline.step(*steps.batch(step))
        seen.append(
            ([part.weight.grad for part in parts], torch.get_rng_state(), [part.tracker.state() for part in parts])
        )
    (stored, random, streams), (again, random_again, streams_again) = seen
    problems = [
        f"gradient {i} differs" for i, (a, b) in enumerate(zip(stored, again, strict=True)) if not torch.equal(a, b)
    ]
    if not torch.equal(random, random_again):
        problems.append("the default generator is elsewhere")
    for one, other in zip(streams, streams_again, strict=True):
        problems += [f"stream {key} is elsewhere" for key in one if not torch.equal(one[key], other[key])]
    return problems


def counted_problems(kind: Any, chunks: int, micro_batches: int, group: dist.ProcessGroup) -> list[str]:
    """What was in flight, and how much ranks are idle, of the actions that were recorded."""
    pipeline, _ = pipeline_of(Steps(kind, chunks, (1,) * micro_batches), group)
    pipeline.step(*Steps(kind, chunks, (1,) * micro_batches).batch(0))
    case = ScheduleCase(kind, group.size(), micro_batches, chunks)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, pipeline.record.actions, group=group)
    ran = simulated(Tables.of(lists(case, everyone)))
    problems = []
    if not isinstance(ran, Run) or ran.idle_share != schedule_formulas.idle_share(case):
        problems.append(f"{case}: idle {ran}, expected {schedule_formulas.idle_share(case)}")
    most = schedule_formulas.most_in_flight(case, group.rank())
    if pipeline.record.in_flight != most:
        problems.append(f"{case}: {pipeline.record.in_flight} in flight, expected {most}")
    return problems


def said_by(what: Callable[[], object]) -> str:
    try:
        what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def missing(said: str, words: list[str]) -> list[str]:
    return [f"{word!r} is not in {said!r}" for word in words if word not in said]


def refusals(group: dist.ProcessGroup) -> dict[str, Check]:
    n, rank, steps = group.size(), group.rank(), Steps()
    inputs, masks = steps.batch(0)

    def step(words: list[str], *args: Any) -> list[str]:
        pipeline, _ = pipeline_of(steps, group)
        return missing(said_by(lambda: pipeline.step(*args)), words)

    def built(words: list[str], chunks: int = 1, **more: Any) -> list[str]:
        return missing(said_by(lambda: pipeline_of(Steps("gpipe", chunks), group, **more)), words)

    empty = [(x[:0],) for (x,) in inputs]
    gives = ((None, 2, 2), torch.float64)
    takes = ((None, 2, 3), torch.float32)
    borders = [Declared((gives,), (gives,)) if rank < n - 1 else Declared((takes,), ())]
    tied = {"tied": [(rank, torch.nn.Parameter(torch.zeros(1 + (rank == n - 1))))]}
    return {
        "none": lambda: step(["ValueError: 0 micro-batches on every rank: expected at least 1"], [], []),
        "small": lambda: step(["has no sample", "3 micro-batches need a batch of at least 3"], empty, masks),
        "negative": lambda: step(["ValueError: -2 micro-batches on every rank: expected at least 1"], None, None, -2),
        "missing": lambda: step(["rank 0 was given no inputs or no targets"], None, None, 2),
        "differing": lambda: step(
            ["were given", "micro-batches: expected the same number on all"],
            inputs if rank else inputs[:2],
            masks if rank else masks[:2],
        ),
        "chunks": lambda: built([f"have {[1] * (n - 1) + [2]} stages"], chunks=1 + (rank == n - 1)),
        "1f1b": lambda: missing(
            said_by(lambda: pipeline_of(Steps(chunks=2), group)[0].step(inputs, masks)), ["1f1b has one chunk a rank"]
        ),
        "border": lambda: built(
            [f"stage {n - 2} gives float64 [any, 2, 2], and stage {n - 1} expects float32 [any, 2, 3]"], borders=borders
        ),
        "tied": lambda: built(["the tied parameter 'tied' is (2,)", f"on stage {n - 1} and (1,)"], tied=tied),
        "not a tensor": lambda: failing(group, Steps(), "output 0 is str", NotATensor),
        "raises": lambda: failing(group, Steps(fails=n - 1, fails_at=1), f"stage {n - 1} will not"),
        "raises first": lambda: failing(group, Steps(fails=0, fails_at=2), "failed in the forward of micro-batch 2"),
        "raises, chunks": lambda: failing(
            group, Steps("interleaved", 2, fails=n, fails_at=0), f"stage {n} (Part) on rank 0"
        ),
        "raises in backward": lambda: failing(group, Steps(), "in the backward of micro-batch 0", NoBackward),
        "exits in forward": lambda: failing(group, Steps(), "SystemExit: enough", Exits),
    }


class NotATensor(Part):
    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> Any:
        return "x" if self.number == 0 else super().forward(x, *rest)


class Exits(Part):
    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> Any:
        if self.number == 0:
            raise SystemExit("enough")
        return super().forward(x, *rest)


class NoBackward(Part):
    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> Any:
        found = super().forward(x, *rest)
        if self.number == 1:
            found.register_hook(_refuse)
        return found


def _refuse(gradient: torch.Tensor) -> None:
    raise ArithmeticError("no backward")


def failing(group: dist.ProcessGroup, steps: Steps, words: str, kind: type[Part] = Part) -> list[str]:
    """Every rank must say what one of them ran into, and go on to work afterwards."""
    pipeline, parts = pipeline_of(steps, group)
    for stage, part in zip(pipeline.stages, parts, strict=True):
        part.__class__ = kind
        assert stage.module is part
    said = said_by(lambda: pipeline.step(*steps.batch(0)))
    return missing(said, [StageFailed.__name__, words, "Traceback"]) + problems_of(Steps(), group)


#: By mutant: where it shows, and where it hides.
TIED_ON_ALL = "tied on all"
SHOWS: dict[str, list[str]] = {
    "F45": ["1f1b of 3", "several"],
    "F61": ["1f1b of 3", "accumulated"],
    "F62": ["1f1b of 5"],
    "F63": ["1f1b of 3"],
    "F64": ["1f1b of 3"],
    "F65": ["three chunks, gpipe", "interleaved of 1"],
    "F67": ["several"],
    "F68": ["tied, accumulated"],
}
HIDES: dict[str, list[str]] = {
    "F45": ["1f1b of 1"],
    "F61": ["1f1b of 1"],
    "F62": ["1f1b of 1", "gpipe of 5"],  # GPipe's stages all swap the same
    "F63": ["1f1b of 1"],
    "F64": ["1f1b of 1", "sum"],
    "F65": ["1f1b of 3"],
    "F67": ["1f1b of 3"],
    "F68": ["tied, zeroed", "accumulated"],
}


def on_ranks() -> Mapping[str, Check]:
    group, n = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    right = rights(n)
    checks: dict[str, Check] = {name: lambda s=s: problems_of(s, group) for name, s in right.items()}
    for mutant, shown in SHOWS.items() if n == 2 else ():
        for name in shown:
            checks[f"{mutant} shows, {name}"] = with_fault(mutant, lambda s=right[name]: problems_of(s, group))
        for name in HIDES[mutant]:
            checks[f"{mutant} hides, {name}"] = with_fault(mutant, lambda s=right[name]: problems_of(s, group))
    if n > 2:
        checks["F02 shows"] = with_fault("F02", lambda: problems_of(right[TIED_ON_ALL], group))
    checks["F02 hides"] = with_fault("F02", lambda: problems_of(right["tied"], group))
    for name, steps in {
        "masks": Steps("1f1b", p=0.5, sizes=(2, 2, 2)),
        "masks of a stream": Steps("1f1b", p=0.5, tracked=True, sizes=(2, 2, 2)),
        "masks, chunks": Steps("interleaved", 2, p=0.5, sizes=(2, 2, 2)),
    }.items():
        checks[name] = lambda s=steps: recomputed_problems(s, group)
        for mutant in ("F48b", "F48c") if n == 2 else ():
            checks[f"{mutant} shows, {name}"] = with_fault(mutant, checks[name])
    checks |= refusals(group)
    return checks


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_failures_and_refusals_on_ranks(world: int) -> None:
    for name, problems in run_world(world, on_ranks).items():
        if "shows" in name:
            assert problems, f"{name} is not seen"
        else:
            assert not problems, (name, problems)


def counts_on_ranks() -> Mapping[str, Check]:
    group, n = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    spread: list[tuple[Any, int, int]] = [("1f1b", 1, 3), ("1f1b", 1, 16), ("gpipe", 1, n), ("interleaved", 2, n + 1)]
    if n < 8:
        spread += [("gpipe", 2, 5), ("interleaved", 3, 16), ("interleaved", 4, 3), ("1f1b", 1, 1)]
    checks: dict[str, Check] = {
        f"{kind} {v} {m}": lambda a=(kind, v, m): counted_problems(*a, group) for kind, v, m in spread
    }
    checks["F60 shows"] = with_fault("F60", lambda: counted_problems("1f1b", 1, n, group))
    return checks


@pytest.mark.parametrize("world", [2, 4, 8])  # all of p, m and v: benchmarks/pipeline_grid.py
def test_what_is_in_flight_and_idle_is_what_the_formulas_say(world: int) -> None:
    for name, problems in run_world(world, counts_on_ranks).items():
        assert bool(problems) == ("shows" in name), (name, problems)


def test_a_batch_is_cut_evenly_or_refused() -> None:
    x, y = torch.arange(5), torch.arange(10).view(5, 2)
    cut = cut_batch([x, y], 3)
    assert [[len(one) for one in found] for found in cut] == [[2, 2], [2, 2], [1, 1]]
    with pytest.raises(ValueError, match="0 micro-batches: expected at least 1"):
        cut_batch([x], 0)
    with pytest.raises(
        ValueError, match="a batch of 5 samples in 6 micro-batches: expected at least one sample in each"
    ):
        cut_batch([x], 6)
    with pytest.raises(ValueError, match=r"tensors of \[2, 5\] samples"):
        cut_batch([x, x[:2]], 1)


def test_layers_are_dealt_evenly_or_refused() -> None:
    assert deal("abcdefg", 2, 2) == [["a", "b"], ["c", "d"], ["e", "f"], ["g"]]
    with pytest.raises(ValueError, match="3 layers on 2 ranks with 2 virtual stages each: expected at least 4 layers"):
        deal("abc", 2, 2)


def test_a_long_header_is_continued() -> None:
    """Many tensors of many dimensions, to this rank itself."""
    from sharded.pipeline_border import _read, _written

    forms = [Form((1,) * i, torch.float32, bool(i % 2)) for i in range(12)]
    label = Label("backward", 3, 5)
    numbers = _written(label, forms)
    assert len(numbers) > HEADER
    assert _read(numbers) == (label, forms)
    assert _read(_written(label, None)) == (label, None)
    assert len(_written(label, [])) == HEADER
    assert Border is not None


def test_the_registry_has_them() -> None:
    of_the_subject = {mutant.id for mutant in mutants.all_mutants() if mutant.subject == "pipeline"}
    assert of_the_subject == {"F02", "F45", "F46", "F48b", "F48c", "F49", "F50", *(f"F{n}" for n in range(60, 71))}


def test_a_mutant_that_is_not_applied_leaves_no_trace() -> None:
    from sharded.pipeline_stage import Stage

    before = dict(vars(Stage))
    with mutants.applied("F61"):
        assert vars(Stage)["backward"] is not before["backward"]
    assert dict(vars(Stage)) == before
