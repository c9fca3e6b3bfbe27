"""The examples are verified as a user would, from another folder; what README.md shows is what is run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from harness.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ADAPTERS = [
    (path, name)
    for path in EXAMPLES
    for name in re.findall(r"^class (\w+)\(Candidate\)", path.read_text("utf-8"), re.M)
]


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, timeout=300)


def row_of(folder: Path, candidate: str) -> tuple[int, dict[str, object]]:
    """The exit code and the row of linear."""
    options = ("--subject", "linear", "--examples", "40", "--seed", "1", "--json", "run.json")
    done = run(folder, "harness.cli", "verify", candidate, *options)
    assert (folder / "run.json").is_file(), done.stderr
    (row,) = json.loads((folder / "run.json").read_text("utf-8"))["rows"]
    return done.returncode, row


@pytest.mark.parametrize(("path", "name"), ADAPTERS, ids=lambda value: getattr(value, "stem", value))
def test_an_example_holds(path: Path, name: str, tmp_path: Path) -> None:
    code, row = row_of(tmp_path, f"{path}:{name}")
    assert (code, row["result"], row["stopped"]) == (0, "held", None), row
    assert row["meshes"] >= 5  # type: ignore[operator]


def test_a_broken_copy_of_the_example_is_found(tmp_path: Path) -> None:
    whole = (ROOT / "examples" / "my_adapter.py").read_text("utf-8")
    broken = whole.replace("dist.all_reduce(grad, group=self.group)", "pass")
    assert broken != whole
    (tmp_path / "broken.py").write_text(broken, "utf-8")
    code, row = row_of(tmp_path, "broken.py:Mine")
    assert (code, row["result"]) == (1, "fault"), row
    (failure,) = row["failures"]  # type: ignore[misc]
    assert failure["findings"][0]["tensor"] == "input[0].grad"
    assert run(tmp_path, "harness.cli", "replay", failure["saved"]).returncode == 1


def test_the_example_of_a_test_run_passes(tmp_path: Path) -> None:
    done = run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "examples" / "test_my_adapter.py"))
    assert done.returncode == 0, done.stdout


def test_every_example_is_one_of_these() -> None:
    assert {path.name for path in EXAMPLES} == {path.name for path, _ in ADAPTERS} | {"test_my_adapter.py"}


def test_the_readme_shows_the_examples() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks == [(ROOT / "examples" / name).read_text("utf-8") for name in ("my_adapter.py", "test_my_adapter.py")]


def test_the_readme_names_commands_and_options_that_exist() -> None:
    named = re.findall(r"shardproof (verify|replay|list|mesh|schedule|train|doctor)\b([^\n`]*)", README)
    assert (
        {command for command, _ in named}
        == {"verify", "replay", "list", "mesh", "schedule", "train", "doctor"}
        == set(main.commands)
    )
    for command, rest in named:
        known = {option for parameter in main.commands[command].params for option in parameter.opts}
        assert set(re.findall(r"(?<=\s)--[\w-]+", rest)) <= known, rest
    both = [
        p for name in ("verify", "schedule", "train") for p in main.commands[name].params if isinstance(p, click.Option)
    ]
    options = re.findall(r"`(--[\w-]+)(?: \w+)?`", README)
    assert options
    assert set(options) <= {option for p in both for option in p.opts}


def test_every_link_of_the_documents_leads_somewhere() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^):#]+)\)", document.read_text("utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
