"""Replaying a case: from its line or its file, with the verdict that it had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from trials import BAD, GOOD, line

from harness.case_file import Reproducer, read
from harness.cli import main
from reference.linear import LinearCase
from reference.mesh import Mesh, MeshCase


@pytest.fixture(autouse=True)
def _leave_signals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command takes over SIGTERM, which is pytest's here."""
    monkeypatch.setattr("harness.world.terminate_cleanly", lambda: None)


def changed(**sizes: Any) -> str:
    """A case whose numbers are exact at any size that fits into memory: of zeros."""
    zeros = {name: {"kind": "zeros"} for name in ("input", "weight", "bias", "output_grad")}
    data = json.loads(line("right.py:Right"))
    data["case"] |= {"dtype": "fp64", "recipes": zeros, **sizes}
    return json.dumps(data)


def replay(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["replay", *arguments])


def test_a_case_that_holds() -> None:
    result = replay(line("right.py:Right"))
    assert result.exit_code == 0, result.output
    assert result.output.startswith("holds, with delays too: ")
    assert result.output.rstrip().endswith("right.py:Right, linear")


def test_a_case_that_does_not_hold_from_its_line_and_its_file(tmp_path: Path) -> None:
    text = line("returning.py:WrongGradientOnLastRank")
    path = read(text).save(tmp_path)
    for given in (text, f"\n {text} \n", str(path)):
        result = replay(given)
        assert result.exit_code == 1
        assert result.output.startswith("mismatch: ")
        assert "weight.grad differs from one process on rank 1: 4 of 8 elements" in result.output
        assert "rank 1 (tp=1): first wrong element [0, 2, 0] of weight.grad (local [0, 0]): got " in result.output
        assert f"  case: {text}\n" in result.output
        assert f"  replay: shardproof replay '{text}'\n" in result.output


def test_a_case_that_the_candidate_refuses() -> None:
    result = replay(line("refusing.py:Bias"))
    assert (result.exit_code, result.output) == (3, "nothing ran: the candidate refuses the case: no bias here\n")
    assert replay(line("refusing.py:Bias", GOOD)).exit_code == 0


def test_a_part_that_the_candidate_does_not_have() -> None:
    result = replay(line("right.py:Right", LinearCase(Mesh.of(tp=1), "row", 1, 1)))
    assert result.exit_code == 3
    assert "right.py:Right has no row_linear" in result.output
    for live in (True, False):
        result = replay(line("right.py:Right", MeshCase(Mesh.of(tp=1), live)))
        assert result.exit_code == 3
        assert f"has no {'group' if live else 'group_ranks'}" in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no-such-file.json", "is neither a file nor JSON: expected the line that a failure printed"),
        ("{", "pass the whole line, between single quotes"),
        ('{"name": "a package.json"}', 'this is no case of shardproof, the key "shardproof" is missing'),
        (line("right.py:Right").replace('"shardproof": 1', '"shardproof": 2'), "this version reads format 1"),
        (line("right.py:Right").replace('"column"', '"diagonal"'), "expected one of 'column', 'row', found 'diagonal'"),
        (line("right.py:Right").replace("tp=2", "tp=0"), "mesh axis 'tp' has size 0: expected a whole number of at le"),
        (line("right.py:Right").replace('"bias": true', '"dtype": "fp8"'), "unknown dtype 'fp8': expected one of fp32"),
        (line("right.py:Nope"), "has no 'Nope'; candidates in it"),
        (line("nowhere.py:Mine"), "there is no file "),
        (
            line("right.py:Right", LinearCase(Mesh.of(tp=10**6), "column", 1, 1)),
            "a world of 1000000 ranks is more than",
        ),
        ("[]", "this is JSON, but it holds []: expected the line that a failure printed"),
        (changed(in_features=10**12), "GiB of memory (in_features 1000000000000, out_features 4, leadi"),
        (changed(in_features=10**400), "a sum of 1000"),
        (changed(leading=[[10**6, 10**6]]), "(in_features 2, out_features 4, leading ((1000000, 1000000),)), and "),
        (changed(leading=[[1] * 70]), "leading has 70 dimensions: expected at most 4"),
        (line("right.py:Right", MeshCase(Mesh.of(tp=10**12))), "GiB of memory (mesh tp=1000000000000), and "),
    ],
)
def test_what_cannot_be_replayed_is_wrong_use(text: str, message: str) -> None:
    result = replay(text)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_groups_that_the_candidate_does_not_claim_to_compute_are_not_held_against_it() -> None:
    reproducer = Reproducer("megatron-core", "mesh", MeshCase(Mesh.of(tp=2, dp=2000)))
    result = replay(reproducer.line())
    assert result.exit_code == 3
    assert "the mesh has 4000 ranks, the candidate computes groups of up to 2048" in result.output


def test_a_candidate_that_cannot_be_described() -> None:
    result = replay(line("declaring.py:UnknownFeature"))
    assert result.exit_code == 2, "wrong use, as in verify"
    assert "supports names 'teleportation'" in result.output
    result = replay(line("declaring.py:Raises"))
    assert result.exit_code == 1
    assert "the candidate raised in its declarations on rank 0: KeyError: 'axes'" in result.output


def test_a_nonsensical_deadline() -> None:
    result = replay("--deadline", "-1", line("right.py:Right", BAD))
    assert result.exit_code == 2
    assert "deadline is -1.0: expected seconds above 0" in result.output


def test_a_hang_ends_at_the_deadline_with_the_stacks() -> None:
    result = replay("--deadline", "3", line("blocking.py:ExtraCollectiveOnRank0"))
    assert result.exit_code == 1
    assert result.output.startswith("hang: ")
    assert "last collective: all_reduce on group [0, 1], float32, 3 elements" in result.output
