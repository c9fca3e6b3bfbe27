"""The main job: candidates times subjects, one row each."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from harness.bench import Bench, CandidateUnusable
from harness.candidate import Candidate
from harness.case_file import Reproducer
from harness.engine import Interrupted, Limits, search
from harness.errors import WrongUse
from harness.events import (
    CandidateDescribed,
    CaseJudged,
    Failure,
    Listener,
    Row,
    RunDone,
    RunStarted,
    SubjectDone,
    SubjectStarted,
)
from harness.find import Spec, spec_of
from harness.preload import modules
from harness.properties import PROPERTIES, property_of
from harness.properties.base import Property
from harness.verdict import Verdict
from harness.world import Terminated, warm_up
from harness.world import max_world as machine_limit
from harness.world.delays import Which
from reference.dtypes import FORMATS

FAILURES = Path(".shardproof") / "failures"


class WorldTooLarge(WrongUse):
    """More ranks are asked for than this machine can run."""


def verify(
    *candidates: str | type[Candidate],
    subjects: Sequence[str] | None = None,
    examples: int = 100,
    max_world: int = 8,
    dtypes: Sequence[str] | None = None,
    seed: int | None = None,
    time_budget: float | None = None,
    deadline: float = 30.0,
    save: Path | str | None = FAILURES,
    delays: Which = "some",
    listen: Listener = lambda event: None,
) -> RunDone:
    """Draws cases and runs them on every candidate.

    candidates: names (``"builtin"``, ``"pkg.module:Class"``, ``"file.py:Class"``) or classes. subjects: all that the
    candidates offer by default. examples: cases for each subject and candidate. max_world: the most ranks of a case.
    dtypes: formats to draw, all that a candidate has by default. seed: drawn and reported where it is None.
    time_budget: seconds for the whole run, shrinking included; a failure that is found near the end may take 3 s more,
    and where it is a hang, five deadlines. deadline: seconds for one case. save: the folder for failing cases. delays:
    which cases have small sleeps before collectives on some of their ranks: ``none``, ``some`` (one of eight) or
    ``all``; a right result does not depend on them. listen: called with every event.

    Returns the rows. Raises WrongUse, before anything runs, for what cannot be asked for. A KeyboardInterrupt is passed
    on once ``listen`` has had what is known by then.
    """
    specs = [spec_of(candidate) for candidate in candidates]
    chosen = [property_of(subject) for subject in (PROPERTIES if subjects is None else subjects)]
    _check(specs, examples, max_world, dtypes, seed, time_budget, save)
    require_deadline(deadline)
    if delays not in get_args(Which):
        raise WrongUse(f"delays is {delays!r}: expected one of {', '.join(get_args(Which))}")
    seed = secrets.randbelow(2**32) if seed is None else seed
    listen(RunStarted(seed, tuple(s.text for s in specs), tuple(p.subject for p in chosen), examples, max_world))
    warm_up(modules(specs))
    started, libraries = time.monotonic(), dict[str, str]()
    rows: list[Row] = []

    def done(row: Row) -> None:
        rows.append(row)
        listen(SubjectDone(row))

    def run_done(interrupted: bool) -> RunDone:
        run = RunDone(seed, tuple(rows), time.monotonic() - started, libraries, interrupted)
        listen(run)
        return run

    try:
        with contextlib.ExitStack() as stack:
            benches = {spec: _described(spec, deadline, stack) for spec in specs}
            for spec, bench in benches.items():
                if isinstance(bench, CandidateUnusable):
                    for subject in chosen:
                        done(_unusable(spec, subject, bench))
                    continue
                with bench:
                    libraries[spec.text] = _library(bench)
                    listen(CandidateDescribed(spec.text, libraries[spec.text]))
                    for number, subject in enumerate(chosen):
                        left = None if time_budget is None else max(0.0, time_budget - (time.monotonic() - started))
                        share = None if left is None else left / max(1, _left(specs, spec, chosen, number))
                        limits = Limits(examples, seed, share, delays=delays)
                        asked = subjects is not None
                        done(_saved(_row(bench, subject, limits, max_world, dtypes, listen, asked), save))
    except Interrupted as error:
        done(_saved(error.row, save))
        rows.extend(_not_begun(specs, chosen, rows))
        run_done(interrupted=True)
        raise error.by from None
    except (KeyboardInterrupt, Terminated):
        rows.extend(_not_begun(specs, chosen, rows))
        run_done(interrupted=True)
        raise
    return run_done(interrupted=False)


def exit_code(rows: Sequence[Row]) -> int:
    """0 all that was asked ran and holds, 1 a fault in a candidate, 2 our own fault, 3 nothing ran."""
    kinds = {failure.kind for row in rows for failure in row.failures}
    if kinds - {"harness"}:
        return 1
    if kinds:
        return 2
    ran = [row for row in rows if row.result == "held"]
    starved = [row for row in rows if row.result == "nothing ran"]
    return 0 if ran and not starved else 3


def _row(
    bench: Bench,
    subject: Property,
    limits: Limits,
    max_world: int,
    dtypes: Sequence[str] | None,
    listen: Listener,
    asked: bool,
) -> Row:
    name = bench.spec.text
    if not subject.offered(bench.description):
        if not asked:
            return Row(name, subject.subject, "not offered")
        why = f"the candidate defines none of {', '.join(subject.methods)}"
        return Row(name, subject.subject, "nothing ran", stopped=why)
    scope = bench.description.scope(max_world, dtypes)
    if subject.uses_dtype and not scope.dtypes:
        has = ", ".join(bench.description.dtypes)
        return Row(name, subject.subject, "nothing ran", stopped=f"the candidate has only {has}")
    listen(SubjectStarted(name, subject.subject, limits.examples))
    row = search(bench, subject, scope, limits, lambda failing: listen(CaseJudged(name, subject.subject, failing)))
    lacking = [dtype for dtype in dtypes or () if dtype not in scope.dtypes and subject.uses_dtype]
    if lacking and row.stopped is None:
        return dataclasses.replace(row, stopped=f"without {', '.join(lacking)}, which the candidate does not have")
    return row


def _described(spec: Spec, deadline: float, stack: contextlib.ExitStack) -> Bench | CandidateUnusable:
    try:
        return stack.enter_context(Bench(spec, deadline=deadline))
    except CandidateUnusable as error:
        return error


def _unusable(spec: Spec, subject: Property, why: CandidateUnusable) -> Row:
    failure = Failure(Reproducer(spec.text, subject.subject, None), Verdict(why.findings))
    return Row(spec.text, subject.subject, "fault", failures=(failure,))


def _not_begun(specs: Sequence[Spec], chosen: Sequence[Property], rows: Sequence[Row]) -> list[Row]:
    """What an interrupted run did not come to."""
    begun = {(row.candidate, row.subject) for row in rows}
    pairs = [(spec.text, subject.subject) for spec in specs for subject in chosen]
    return [Row(*pair, "nothing ran", stopped="interrupted before it began") for pair in pairs if pair not in begun]


def _saved(row: Row, folder: Path | str | None) -> Row:
    if folder is None or not row.failures:
        return row
    return dataclasses.replace(row, failures=tuple(_saved_failure(failure, Path(folder)) for failure in row.failures))


def _saved_failure(failure: Failure, folder: Path) -> Failure:
    """The failure and where it is. One that cannot be saved is still a failure."""
    try:
        return dataclasses.replace(failure, saved=str(failure.reproducer.save(folder, failure.history)))
    except OSError as error:
        return dataclasses.replace(failure, not_saved=str(error))


def _left(specs: Sequence[Spec], spec: Spec, chosen: Sequence[Property], number: int) -> int:
    """Rows that still have to share the time."""
    return len(chosen) - number + len(chosen) * (len(specs) - 1 - specs.index(spec))


def _library(bench: Bench) -> str:
    versions = bench.description.versions
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or str(bench.description.name)


def _check(
    specs: Sequence[Spec],
    examples: int,
    max_world: int,
    dtypes: Sequence[str] | None,
    seed: int | None,
    time_budget: float | None,
    save: Path | str | None,
) -> None:
    if not specs:
        raise WrongUse("no candidate is given: name at least one, for example builtin")
    if examples < 1:
        raise WrongUse(f"examples is {examples}: expected at least 1")
    if seed is not None and seed < 0:
        raise WrongUse(f"seed is {seed}: expected at least 0")
    if time_budget is not None and not time_budget > 0:
        raise WrongUse(f"time_budget is {time_budget}: expected seconds above 0")
    if save is not None:
        folder = next(p for p in (Path(save).absolute(), *Path(save).absolute().parents) if os.access(p, os.F_OK))
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise WrongUse(f"cannot save failing cases to {save}: {folder} is not a folder that can be written to")
    require_limits(max_world, dtypes)


def require_limits(max_world: int, dtypes: Sequence[str] | None) -> None:
    """Raises WrongUse for limits of what is drawn that cannot be used."""
    for dtype in dtypes or ():
        if dtype not in FORMATS:
            raise WrongUse(f"unknown dtype {dtype!r}: expected one of {', '.join(FORMATS)}")
    if max_world < 1:
        raise WrongUse(f"max_world is {max_world}: expected at least 1")
    require_world(max_world)


def require_deadline(deadline: float) -> None:
    """Raises WrongUse for what is no time."""
    if not deadline > 0:
        raise WrongUse(f"deadline is {deadline}: expected seconds above 0")


def require_world(world: int) -> None:
    """Raises WorldTooLarge unless this machine can run so many ranks."""
    limit = machine_limit()
    if world > limit.ranks:
        raise WorldTooLarge(
            f"a world of {world} ranks is more than this machine allows: at most {limit.ranks} ({limit.why}); "
            "ask for fewer or use a larger machine"
        )
