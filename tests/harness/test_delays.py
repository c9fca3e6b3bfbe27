"""Delays: small sleeps before collectives, the same ones whenever a case runs, bring out who does not wait."""

from __future__ import annotations

import json
from typing import cast

import pytest
import rank_functions as on_rank
from click.testing import CliRunner
from trials import candidate

from harness.bench import Bench, Trial, checked
from harness.case_file import MalformedReproducer, Reproducer, read
from harness.cli import main
from harness.errors import WrongUse
from harness.properties import property_of
from harness.replay import replay
from harness.verdict import Finding, Verdict
from harness.verification import verify
from harness.world import Pool
from harness.world.delays import LONGEST, Delays, Which, chosen
from reference.codec import encode
from reference.collectives import CollectivesCase
from reference.mesh import Mesh

COLLECTIVES = property_of("collectives")
#: On two ranks: rank 1 is late, by more than Impatient waits, and rank 0 is not.
SEED = next(s for s in range(1, 1000) if Delays(s).before(1, 1) > 0.9 * LONGEST and not Delays(s).before(0, 1))


def test_some_ranks_are_late_before_some_of_their_collectives() -> None:
    late = {rank for rank in range(100) if any(Delays(7).before(rank, n) for n in range(1, 50))}
    assert 30 < len(late) < 70
    sleeps = [Delays(7).before(rank, n) for rank in late for n in range(1, 50)]
    assert 0.4 < sum(s > 0 for s in sleeps) / len(sleeps) < 0.6
    assert max(sleeps) <= LONGEST
    assert sleeps == [Delays(7).before(rank, n) for rank in late for n in range(1, 50)]
    assert not any(Delays(0).before(rank, n) for rank in range(20) for n in range(20))
    assert sleeps != [Delays(8).before(rank, n) for rank in late for n in range(1, 50)]


def test_one_case_of_eight_gets_delays() -> None:
    cases = [json.dumps({"size": n}) for n in range(4000)]
    assert 400 < sum(chosen("some", case) > 0 for case in cases) < 600
    assert all(chosen("all", case) for case in cases)
    assert not any(chosen("none", case) for case in cases)
    assert len({chosen("all", case) for case in cases}) > 3900


def test_a_rank_sleeps_before_its_collective() -> None:
    with Pool(2, preload=["rank_functions"]) as pool:
        late = pool.start(on_rank.seconds_of_an_all_reduce, delays=SEED).result().values()
        assert late[1] >= Delays(SEED).before(1, 1)
        assert late[0] >= Delays(SEED).before(1, 1) / 2, "which waits for rank 1"
        again = [pool.run(on_rank.seconds_of_an_all_reduce).values()[1] for _ in range(10)]
        assert min(again) < Delays(SEED).before(1, 1), "a job without delays has none"


def test_who_does_not_wait_is_found_and_replayed() -> None:
    case = CollectivesCase(Mesh.of(tp=2), "reduce", ((3,),))
    spec = candidate("impatient.py:Impatient")
    with Bench(spec) as bench:
        # On a loaded machine rank 0 may come late by itself, as late as rank 1. Fresh processes have the same delays.
        trials = (bench.check(COLLECTIVES, case, SEED) for _ in range(20))
        trial = next(trial for trial in trials if trial.verdict.kind == "mismatch")
    assert trial.delays == SEED
    done = verify(spec, subjects=["collectives"], max_world=2, examples=200, seed=5, save=None, delays="all")
    # One rank of two that is late, before the one sum that there is, and not the other: one case of some forty.
    failure = next(one for one in done.rows[0].failures if one.kind == "mismatch")
    if failure.reproducer.delays:  # on a loaded machine it may fail without them
        data = json.loads(failure.reproducer.line())
        assert read(json.dumps(data)) == failure.reproducer
        assert data["delays"] == failure.reproducer.delays
        assert replay(read(failure.reproducer.line())).kind in ("mismatch", "flaky")


def test_a_right_candidate_holds_with_delays() -> None:
    done = verify("builtin", subjects=["collectives", "linear"], max_world=4, examples=20, save=None, delays="all")
    assert [row.result for row in done.rows] == ["held", "held"]


def test_what_fails_without_delays_is_reported_without() -> None:
    case = CollectivesCase(Mesh.of(tp=2), "reduce", ((3,),))
    with Bench("builtin+F51") as bench:
        trial = checked(bench, COLLECTIVES, case, "all")
    assert trial.verdict.kind == "mismatch"
    assert trial.delays == 0


class Racing:
    """In place of a bench: fails where a rank is late, and else when it is its turn."""

    def __init__(self, *fails: bool, late: bool = True) -> None:
        self.fails, self.late = list(fails), late

    def afresh(self, subject: object, case: object, delays: int = 0) -> Trial:
        failing = self.late if delays else self.fails.pop(0)
        return Trial(Verdict((Finding("mismatch", "wrong"),) if failing else ()), (), delays)

    def check(self, subject: object, case: object, delays: int = 0) -> Trial:
        first, second = self.afresh(subject, case, delays), self.afresh(subject, case, delays)
        if first.verdict.kind == second.verdict.kind:
            return second
        return Trial(Verdict((Finding("flaky", "failed once and held in fresh processes"),)), (), delays)


def checked_racing(bench: Racing, which: Which = "some") -> Trial:
    """On a case that gets no delays by itself, or, where all do, one that does."""
    case = CollectivesCase(Mesh.of(tp=2), "reduce", ((3,),))
    return checked(cast("Bench", bench), COLLECTIVES, case, which)


def test_what_fails_once_is_tried_with_delays() -> None:
    assert not chosen("some", json.dumps(encode(CollectivesCase(Mesh.of(tp=2), "reduce", ((3,),)))))
    raced = checked_racing(Racing(True, False))
    assert raced.verdict.kind == "mismatch"
    assert raced.delays
    assert checked_racing(Racing(True, False, late=False)).verdict.kind == "flaky", "nothing to do with who is late"
    assert checked_racing(Racing(True, False), "none").verdict.kind == "flaky", "when none are wanted"


def test_a_race_that_is_lost_once_without_delays_keeps_them() -> None:
    assert checked_racing(Racing(True, True, False), "all").delays
    assert not checked_racing(Racing(True, True, True), "all").delays


def test_a_race_is_replayed_by_delays() -> None:
    """A case that holds where no rank is late, as a race does that was found on a loaded machine."""
    case = CollectivesCase(Mesh.of(tp=2), "reduce", ((3,),))
    made = Reproducer(candidate("racing.py:Racing"), "collectives", case)
    result = CliRunner().invoke(main, ["replay", made.line()])
    assert result.exit_code == 1, result.output
    assert "holds where no rank is late, and fails with delays of seed" in result.output
    line = next(text for text in result.output.splitlines() if text.startswith("  case: ")).removeprefix("  case: ")
    assert read(line).delays
    assert replay(read(line)).kind == "mismatch"


def test_wrong_delays_are_refused() -> None:
    with pytest.raises(WrongUse, match="delays is 'often': expected one of none, some, all"):
        verify("builtin", delays="often", save=None)  # type: ignore[arg-type]
    line = {"shardproof": 1, "candidate": "builtin", "subject": "collectives", "delays": "late"}
    line["case"] = encode(CollectivesCase(Mesh.of(tp=2), "reduce"))
    with pytest.raises(MalformedReproducer, match="the key 'delays' holds 'late'; expected a seed"):
        read(json.dumps(line))
