"""Reproducers: one line that can be pasted, and files that hold it."""

from __future__ import annotations

import errno
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from drawing import FULL
from hypothesis import given
from hypothesis import strategies as st

import strategies.linear
import strategies.mesh
from harness.case_file import FORMAT, MalformedReproducer, Reproducer, read
from harness.errors import WrongUse
from reference.linear import LinearCase
from reference.mesh import Mesh, MeshCase

CASE = MeshCase(Mesh.of(tp=2, dp=3))
HELD = Reproducer("builtin+F01", "mesh", CASE)
reproducers = st.builds(Reproducer, st.text(), st.just("linear"), strategies.linear.cases(FULL)) | st.builds(
    Reproducer, st.text(), st.just("mesh"), strategies.mesh.cases(FULL)
)


def changed(**changes: Any) -> str:
    """The line with other values; None leaves a key out."""
    data = {**json.loads(HELD.line()), **changes}
    return json.dumps({key: value for key, value in data.items() if value is not None})


@given(reproducers)
def test_a_line_is_read_as_it_was_written(reproducer: Reproducer) -> None:
    line = reproducer.line()
    assert read(line) == reproducer
    assert read(f"  {line}\n") == reproducer
    assert line.isascii()
    assert "\n" not in line
    assert shlex.split(f"shardproof replay '{line}'") == ["shardproof", "replay", line]


def test_the_line_is_short_and_says_what_it_is() -> None:
    assert json.loads(HELD.line()) == {
        "shardproof": FORMAT,
        "candidate": "builtin+F01",
        "subject": "mesh",
        "case": {"mesh": "tp=2,dp=3"},
    }


@given(st.text(alphabet="'\"\\$`é\n x"))
def test_quotes_in_names_survive_the_shell(name: str) -> None:
    line = Reproducer(name, "mesh", CASE).line()
    (pasted,) = shlex.split(f"'{line}'")
    assert read(pasted).candidate == name


@pytest.mark.parametrize(
    ("candidate", "start"),
    [
        ("builtin+F04", "linear-builtin+F04-"),
        ("/home/me/it's mine.py:Mine", "linear-it-s-mine-py-Mine-"),
        ("pkg.module:Class+v", "linear-pkg-module-Class+v-"),
        ("..", "linear----"),
    ],
)
def test_a_file_is_read_as_it_was_written(tmp_path: Path, candidate: str, start: str) -> None:
    reproducer = Reproducer(candidate, "linear", LinearCase(Mesh.of(tp=2), "row", 2, 3))
    folder = tmp_path / "new" / "folder"
    path = reproducer.save(folder)
    assert path.name.startswith(start)
    assert path.suffix == ".json"
    assert read(str(path)) == read(f" {path}\n") == reproducer
    assert path.read_text(encoding="utf-8") == reproducer.line() + "\n"
    assert reproducer.save(folder) == path
    assert list(folder.iterdir()) == [path], "nothing else is left behind"


def test_a_relative_path_is_found_again_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        (folder / "sub").mkdir(parents=True)
    (here / "sub" / "mine.py").touch()
    reproducer = Reproducer("sub/mine.py:Mine+v", "mesh", CASE)
    monkeypatch.chdir(here)
    path = reproducer.save(tmp_path)
    assert read(str(path)) == reproducer, "relative where that works"
    monkeypatch.chdir(there)
    assert read(str(path)) == Reproducer(f"{here}/sub/mine.py:Mine+v", "mesh", CASE)
    (there / "sub" / "mine.py").touch()
    assert read(str(path)) == reproducer, "a checkout elsewhere has a file of its own"
    (there / "sub" / "mine.py").unlink()
    (here / "sub" / "mine.py").unlink()
    assert read(str(path)) == reproducer, "nowhere: the message names what was asked for"


def test_a_file_keeps_the_cases_that_ran_before(tmp_path: Path) -> None:
    path = HELD.save(tmp_path, ["one", "two"])
    assert json.loads(path.read_text())["history"] == ["one", "two"]
    assert read(str(path)) == HELD


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        HELD.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_long_name_is_shortened_in_the_file_s_name(tmp_path: Path) -> None:
    reproducer = Reproducer(f"{'é' * 300}.py:Mine", "mesh", CASE)
    path = reproducer.save(tmp_path)
    assert path.name.endswith(f"-py-Mine-{path.stem[-12:]}.json")
    assert read(str(path)) == reproducer


def test_other_cases_go_to_other_files(tmp_path: Path) -> None:
    made = [
        HELD,
        Reproducer("builtin+F02", "mesh", CASE),
        Reproducer("builtin+F01", "mesh", MeshCase(Mesh.of(tp=2))),
        Reproducer("builtin+F01", "mesh", MeshCase(Mesh.of(tp=2, dp=3), live=True)),
        Reproducer("a/x", "mesh", CASE),
        Reproducer("b/x", "mesh", CASE),
    ]
    assert len({reproducer.save(tmp_path) for reproducer in made}) == len(made)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is neither a file nor JSON: expected the line that a failure printed, {"),
        ("no-such-file.json", "'no-such-file.json' is neither a file nor JSON"),
        ("[]", "this is JSON, but it holds []: expected the line that a failure printed, {"),
        ("[1, 2]", "this is JSON, but it holds [1, 2]: expected the line"),
        ("null", "this is JSON, but it holds None: expected the line"),
        ('"builtin"', "this is JSON, but it holds 'builtin': expected the line"),
        (str(list(range(10_000))), "this is JSON, but it holds [0, 1, 2, 3, 4, 5, ...]: expected the line"),
        ("{", "not JSON ("),
        (HELD.line()[:-3], "pass the whole line, between single quotes"),
        (HELD.line() + "}", "not JSON (Extra data"),
        (HELD.line().replace('"', ""), "not JSON ("),
        ("{}", 'this is no case of shardproof, the key "shardproof" is missing: expected the line that a failure'),
        ('{"name": "package", "version": 1}', 'the key "shardproof" is missing'),
        (changed(shardproof=2), f"this case has format 2; this version reads format {FORMAT}"),
        (changed(shardproof="1"), "this case has format '1'; this version reads format"),
        (changed(candidate=None), "the key 'candidate' holds None; expected a name"),
        (changed(candidate=["builtin"]), "the key 'candidate' holds ['builtin']; expected a name"),
        (changed(subject=None), "the key 'subject' holds None; expected a name"),
        (changed(subject=7), "the key 'subject' holds 7; expected a name"),
        (changed(subject="lineal"), "unknown subject 'lineal'; expected one of mesh, collectives"),
        (changed(subject="linear"), "LinearCase: missing field 'in_features'"),
        (changed(case=None), "MeshCase: expected dict, found None"),
        (changed(case="tp=2"), "MeshCase: expected dict, found 'tp=2'"),
        (changed(case={"mesh": "tp=two"}), "MeshCase.mesh: cannot read 'tp=two' as an axis"),
        (changed(case={"mesh": "tp=2", "live": 1}), "MeshCase.live: expected bool, found 1"),
        (changed(case={"mesh": "tp=2", "dead": True}), "MeshCase: unknown field 'dead'; the fields are mesh, live"),
    ],
)
def test_what_is_no_reproducer_is_refused(text: str, message: str) -> None:
    with pytest.raises(MalformedReproducer) as caught:
        read(text)
    assert message in str(caught.value)
    assert isinstance(caught.value, WrongUse)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"import torch\n", b'"text"'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "case.json"
    path.write_bytes(content)
    with pytest.raises(MalformedReproducer, match=r"is not JSON|this is JSON, but it holds 'text'"):
        read(str(path))
    with pytest.raises(MalformedReproducer, match="is neither a file nor JSON"):
        read(str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "FAILED tests/test_linear.py::test_linear - " + "x" * 500,  # no file can have such a name
        "a\x00b",
        "[" * 100_000,
        '{"shardproof": ' + "[" * 100_000,
        '{"shardproof": ' + "9" * 5000 + "}",
        '{"shardproof": true, "candidate": "builtin", "subject": "mesh", "case": {"mesh": ""}}',
        changed(case={"mesh": json.loads("[" * 800 + "]" * 800)}),
    ],
    ids=["pasted line", "nul", "deep", "deep JSON", "long number", "true is not 1", "deep case"],
)
def test_text_that_breaks_a_parser_is_refused_like_any_other(text: str) -> None:
    with pytest.raises(MalformedReproducer):
        read(text)


def test_a_case_that_cannot_be_made_is_refused() -> None:
    case = {"mesh": "tp=1", "kind": "column", "in_features": 1000, "out_features": 1, "dtype": "bf16"}
    line = json.dumps({"shardproof": 1, "candidate": "builtin", "subject": "linear", "case": case})
    with pytest.raises(MalformedReproducer, match="cannot be exact with 8 significand bits"):
        read(line)
    unknown = case | {"in_features": 1, "recipes": {"weight": {"kind": "ordinary"}}}
    line = json.dumps({"shardproof": 1, "candidate": "builtin", "subject": "linear", "case": unknown})
    with pytest.raises(MalformedReproducer, match="unknown recipe kind 'ordinary': expected one of"):
        read(line)
