"""Runs one case of one candidate on real ranks and says what came of it."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from harness import describe
from harness.endings import findings_of, message_of, rejection_of
from harness.find import Spec, UnknownCandidate, spec_of
from harness.oracle.soundness import UnsoundReference
from harness.preload import modules
from harness.properties.base import Description, Property, World
from harness.verdict import Finding, Verdict
from harness.world import Outcome, Pending, Pool, Pools, warm_up
from harness.world.delays import Which, chosen
from reference.codec import encode
from reference.layout import layout_text
from reference.mesh import Mesh

#: The label of the job that is no case.
_DESCRIBE = "describe"

#: A statistic below it is looked at again with more runs. Limits are 16, and the scatter of eight runs falls with the
#: eighth power.
_CLOSE = 100.0

#: A case fails without delays where it does so this often in fresh processes.
_SURELY = 3

#: Seeds of delays that are tried on a flaky case.
_RACES = 3

#: Of the cases that ran before a flaky one, these are shown.
_SHOWN = 3


class CandidateUnusable(Exception):
    """The candidate cannot even be described; the findings say why."""

    def __init__(self, spec: Spec, findings: Sequence[Finding]) -> None:
        super().__init__(f"{spec.text}: {findings[0].message}\n{findings[0].details}".rstrip())
        self.spec = spec
        self.findings = tuple(findings)


@dataclass(frozen=True)
class Trial:
    """A verdict, the cases that had run in the same processes before, and the seed of the delays."""

    verdict: Verdict
    history: tuple[str, ...] = ()
    delays: int = 0


class Bench:
    """One candidate and the ranks that it runs on, a context manager.

    Ranks live from case to case, one pool a world size, and are replaced after every failure.

    Raises CandidateUnusable where the candidate's class cannot be imported or made, UnknownCandidate where there is no
    such class or variant, WrongDeclaration where what it declares cannot be used.
    """

    def __init__(self, spec: Spec | str, *, deadline: float = 30.0, quiet: float = 5.0) -> None:
        self.spec = spec_of(spec) if isinstance(spec, str) else spec
        self.deadline = deadline
        self._opened: dict[int, set[Any]] = {}
        self._pools = Pools(deadline=deadline, quiet=quiet, preload=modules([self.spec]))
        try:
            self.description = self._describe()
        except BaseException:
            self._pools.close()
            raise

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._pools.close()

    def ranks(self, mesh: Mesh) -> Pool:
        """The ranks of a mesh, for who runs on them what is no case."""
        return self._pool_for(mesh.size, mesh)

    def check(self, subject: Property, case: Any, delays: int = 0) -> Trial:
        """Runs the case; a failure in used processes is repeated in fresh ones.

        delays: the seed of `harness.world.delays.Delays`.

        A hang is repeated in any case: on a loaded machine a lost packet looks like one for some seconds, until TCP
        sends it again after 1, 3 and 7 s. If the case then holds, its finding is kept as ``flaky`` together with the
        cases that ran before it.
        """
        first = self.once(subject, case, delays)
        if not first.verdict.findings or (not first.history and first.verdict.kind != "hang"):
            return first
        second = self.afresh(subject, case, delays)
        if second.verdict.findings:
            return second
        return Trial(Verdict(tuple(_flaky(first))), first.history, delays)

    def afresh(self, subject: Property, case: Any, delays: int = 0) -> Trial:
        """Runs the case in processes in which nothing ran before."""
        for run in subject.runs(case, self.description):
            self._restart(subject.world(run))
        return self.once(subject, case, delays)

    def _pool_for(self, world: int, mesh: Any) -> Pool:
        """The pool of this world, with fresh ranks where they have as many meshes open as the candidate bears.

        Fresh ranks cost less than closing: destroying the gloo groups of one mesh takes as long as starting four ranks.
        """
        opened = self._opened.setdefault(world, set())
        if mesh not in opened and len(opened) >= self.description.meshes_at_once:
            self._restart(world)
        opened.add(mesh)
        return self._pools.get(world)

    def _restart(self, world: int) -> None:
        self._pools.get(world).restart()
        self._opened.get(world, set()).clear()

    def _describe(self) -> Description:
        outcome = self._pools.get(1).run(describe.on_rank, self.spec, label=_DESCRIBE)
        refused = rejection_of(outcome) or message_of(outcome, UnknownCandidate)
        if refused is not None:
            raise UnknownCandidate(f"candidate {self.spec.text!r}: {refused}")
        declared = message_of(outcome, describe.WrongDeclaration)
        if declared is not None:
            raise describe.WrongDeclaration(f"candidate {self.spec.text!r} declares what cannot be used: {declared}")
        if outcome.kind != "ok":
            raise CandidateUnusable(self.spec, findings_of(outcome, None))
        (description,) = outcome.values()
        assert isinstance(description, Description)
        return description

    def once(self, subject: Property, case: Any, delays: int = 0) -> Trial:
        """Runs the case in the processes there are, and believes what comes out."""
        return replace(self._once(subject, case, delays), delays=delays)

    def _started(self, subject: Property, run: Any, delays: int, *more: Any) -> Pending:
        world = subject.world(run)
        pool = self._pool_for(world, _opened(run, world))
        label = json.dumps(encode(run))
        return pool.start(subject.on_rank, self.spec, run, *more, label=label, delays=delays)

    def _once(self, subject: Property, case: Any, delays: int) -> Trial:
        warm_up(subject.preload)  # for ranks that start from now on
        runs = tuple(subject.runs(case, self.description))
        worlds: list[World] = []
        expected: Any = None
        history: tuple[str, ...] = ()
        for number, run in enumerate(runs):
            pending = self._started(subject, run, delays)
            if number == 0:
                # The parent works while the ranks do.
                try:
                    expected = subject.expected(case)
                except Exception as error:
                    pending.result()
                    return Trial(Verdict((_own_fault("the reference raised", error),)))
            outcome: Outcome = pending.result()
            history += tuple(label for label in outcome.history if label != _DESCRIBE)
            carried_on = subject.carried_on(run, outcome.values()) if outcome.kind == "ok" else None
            if carried_on is not None:
                self._restart(subject.world(run))
                outcome = self._started(subject, run, delays, carried_on).result()
            if outcome.kind != "ok":
                self._opened.pop(subject.world(run), None)  # its processes are replaced
                return _failed(subject, run, outcome, history)
            worlds.append(outcome.values())
        differ = _layouts_differ(case, worlds[0])
        if differ is not None:
            return Trial(Verdict((differ,)), history)
        try:
            verdict = subject.judge(case, self.description, expected, worlds)
            if is_close(verdict):
                careful = subject.careful(case)
                verdict = verdict if careful is None else subject.judge(case, self.description, careful, worlds)
        except Exception as error:
            return Trial(Verdict((_own_fault("judging raised", error),)), history)
        return Trial(replace(verdict, findings=verdict.findings + _side_effects(case, worlds)), history)


def checked(bench: Bench, subject: Property, case: Any, which: Which) -> Trial:
    """What came of the case, with delays if it gets some; without them, where it fails without them too, each time.

    What fails once and holds in fresh processes may be a race: then with delays, unless none are wanted, it may fail
    again, and can be shrunk and replayed.
    """
    delays = chosen(which, json.dumps(encode(case)))
    trial = bench.check(subject, case, delays)
    if trial.verdict.kind == "flaky" and which != "none":
        return next(raced(bench, subject, case, delays), trial)
    if not delays or trial.verdict.kind in (None, "flaky"):
        return trial
    # A race may be lost once without delays, and won when it is shrunk or replayed.
    plain = [bench.afresh(subject, case) for _ in range(_SURELY)]
    return plain[-1] if all(one.verdict.kind == trial.verdict.kind for one in plain) else trial


def raced(bench: Bench, subject: Property, case: Any, delays: int) -> Iterator[Trial]:
    """Trials of a case with other delays that fail, twice each: it may fail only where some ranks come late."""
    for seed in range(delays + 1, delays + 1 + _RACES):
        trial = bench.afresh(subject, case, seed)
        if trial.verdict.findings:
            again = bench.afresh(subject, case, seed)
            if again.verdict.findings:
                yield again


def is_close(verdict: Verdict) -> bool:
    """Whether what is wrong may be the scatter of a tolerance: it is estimated from a few disturbed runs."""
    statistics = [float(verdict.facts.get(name, 0.0)) for name in ("worst", "slope")]
    return any(found.kind == "mismatch" for found in verdict.findings) and 0 < max(statistics) < _CLOSE


def _failed(subject: Property, run: Any, outcome: Outcome, history: tuple[str, ...]) -> Trial:
    rejection = rejection_of(outcome)
    if rejection is not None:
        return Trial(Verdict(rejected=rejection), history)
    found = findings_of(outcome, _opened(run, subject.world(run)))
    where = subject.stuck(run, outcome.told) if found[0].kind != "harness" else None
    if where is not None:
        found[0] = replace(found[0], message=f"{found[0].message}; {where}")
    return Trial(Verdict(tuple(found)), history)


def _opened(run: Any, world: int) -> Any:
    """The mesh of the case, where its ranks are those that run; None where they are only computed with."""
    mesh = getattr(run, "mesh", None)
    return mesh if mesh is not None and mesh.size == world else None


def _layouts_differ(case: Any, world: World) -> Finding | None:
    """A rank that names another layout than the first one: then there is no saying what the ranks hold together."""
    for rank, observation in enumerate(world):
        for name in {**world[0].layouts, **observation.layouts}:
            here, there = observation.layouts.get(name), world[0].layouts.get(name)
            if here != there:
                texts = ["not given" if said is None else layout_text(said) for said in (here, there)]
                message = f"the layout of {name} is {texts[0]} on rank {rank} and {texts[1]} on rank 0: it must be one"
                return Finding("disagree", message, rank, case.mesh.describe(rank), name)
    return None


def _flaky(trial: Trial) -> list[Finding]:
    """Says what may be behind it, and shows the last of the cases before it; the trial has all of them."""
    found, count = trial.verdict.findings[0], len(trial.history)
    why, before = "nothing ran before it, so probably a loaded machine", ""
    if count:
        why = "probably state left behind by an earlier case"
        ran = f"{count} case{'s' if count > 1 else ''} ran before it in these processes"
        last = f", the last {_SHOWN}" if count > _SHOWN else ""
        before = "\n".join([f"{ran}{last}:", *(f"  {line}" for line in trial.history[-_SHOWN:])])
    details = f"{found.details}\n{before}".strip()
    message = f"failed once and held in fresh processes, {why}: {found.message}"
    return [replace(found, kind="flaky", message=message, details=details)]


def _side_effects(case: Any, worlds: Sequence[World]) -> tuple[Finding, ...]:
    findings: dict[str, Finding] = {}
    for rank, observation in enumerate(worlds[0]):
        for what in observation.side_effects:
            findings.setdefault(what, Finding("side-effect", f"the candidate {what}", rank, case.mesh.describe(rank)))
    return tuple(findings.values())


def _own_fault(what: str, error: Exception) -> Finding:
    if isinstance(error, UnsoundReference):
        return Finding("harness", str(error))
    text = "".join(traceback.format_exception(error)).rstrip()
    return Finding("harness", f"{what} {type(error).__name__}: {error}", details=text)
