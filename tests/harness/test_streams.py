"""Standard streams that are closed, full, or read by nobody: the exit code is the verdict's, and no traceback shows."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from trials import candidate

COMMAND = f"{shlex.quote(sys.executable)} -m harness.cli"
RUN = "--subject linear --examples 8 --max-world 1 --seed 1 --save kept --json run.json"
HOLDS = f"verify {shlex.quote(candidate('right.py:Right'))} {RUN}"
FAULT = f"verify {shlex.quote(candidate('returning.py:NaN'))} {RUN}"
FULL = "Error: cannot write to stdout: No space left on device\n"

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists() or shutil.which("sh") is None, reason="needs a shell")


def told(folder: Path, command: str, **environment: str) -> tuple[int, str, str]:
    """The exit code, stdout and stderr. A command that ends with "| nobody" writes into a pipe without a reader."""
    alone = command.removesuffix("| nobody")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            ["sh", "-c", f"exec {COMMAND} {alone}"],
            cwd=folder,
            env={**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "", **environment},
            stdout=subprocess.PIPE if alone == command else writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            check=False,
        )
    finally:
        os.close(writer)
    return done.returncode, done.stdout or "", done.stderr


@pytest.mark.parametrize(("command", "code"), [(HOLDS, 0), (FAULT, 1)])
@pytest.mark.parametrize(
    ("streams", "unbuffered", "code_if_it_holds", "message"),
    [
        ("| nobody", "", 0, ""),
        (">/dev/full", "", 2, FULL),
        (">/dev/full", "1", 2, FULL),
        (">&- 2>&- <&-", "", 0, ""),
    ],
)
def test_the_exit_code_is_the_verdict(
    tmp_path: Path, command: str, code: int, streams: str, unbuffered: str, code_if_it_holds: int, message: str
) -> None:
    got, _, errors = told(tmp_path, f"{command} {streams}", PYTHONUNBUFFERED=unbuffered)
    assert (got, errors) == (code or code_if_it_holds, message)
    assert (tmp_path / "run.json").is_file(), "files are written although nobody reads the rest"
    assert (tmp_path / "kept").is_dir() == (command == FAULT)


@pytest.mark.parametrize("command", ["--help", "verify --help", "mesh tp=2"])
@pytest.mark.parametrize(
    ("streams", "code", "message"), [("| nobody", 141, ""), (">/dev/full", 2, FULL), (">&-", 0, "")]
)
def test_what_only_tells_ends_as_other_tools_do(
    tmp_path: Path, command: str, streams: str, code: int, message: str
) -> None:
    for unbuffered in ("", "1"):
        got, _, errors = told(tmp_path, f"{command} {streams}", PYTHONUNBUFFERED=unbuffered)
        assert (got, errors) == (code, message)


@pytest.mark.parametrize("streams", ["2>/dev/full", "2>&-"])
def test_an_error_that_cannot_be_told_is_an_error(tmp_path: Path, streams: str) -> None:
    assert told(tmp_path, f"verify bulletin {streams}") == (2, "", "")


def test_a_narrow_encoding_hides_nothing(tmp_path: Path) -> None:
    shutil.copy(candidate("right.py"), tmp_path / "right.py")
    (tmp_path / "naïve.py").write_text("from right import Right\nclass Mine(Right):\n    name = 'naïve'\n")
    code, output, errors = told(tmp_path, f"verify naïve.py:Mine {RUN}", PYTHONIOENCODING="ascii")
    assert code == 0, errors
    assert re.search(r"na\\xefve.py:Mine +na\\xefve +linear +held", output)
