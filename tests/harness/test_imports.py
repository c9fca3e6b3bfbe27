"""The dependency rules of ARCHITECTURE.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = {"harness", "reference", "sharded", "strategies"}
ALLOWED_OURS = {
    "reference": {"reference"},
    "sharded": {"sharded"},
    "strategies": {"reference", "strategies"},
    "harness": {"harness", "reference", "strategies"},
}
ALLOWED_LIBRARIES = {"reference": {"torch", "numpy"}, "sharded": {"torch"}, "strategies": {"hypothesis"}}
ONLY_USER_OF_SHARDED = ROOT / "harness" / "candidates" / "builtin"


def imported(source: str) -> Iterator[str]:
    """The top-level packages that a module's text imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield (node.module or "").partition(".")[0]


def forbidden(package: str, path: Path, source: str, standard_library: frozenset[str]) -> set[str]:
    """What the module imports and must not."""
    found = set(imported(source)) - standard_library
    ours = set(ALLOWED_OURS[package]) | ({"sharded"} if ONLY_USER_OF_SHARDED in path.parents else set())
    libraries = found - OURS
    wrong = (found & OURS) - ours
    if package in ALLOWED_LIBRARIES:
        wrong |= libraries - ALLOWED_LIBRARIES[package]
    return wrong


def modules() -> list[tuple[str, Path]]:
    return [(package, path) for package in sorted(OURS) for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize(("package", "path"), modules(), ids=lambda v: v if isinstance(v, str) else v.name)
def test_imports_go_one_way(package: str, path: Path) -> None:
    import sys

    wrong = forbidden(package, path, path.read_text(encoding="utf-8"), sys.stdlib_module_names)
    assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}: see ARCHITECTURE.md"


@pytest.mark.parametrize(
    ("package", "source", "wrong"),
    [
        ("reference", "import torch\nimport hypothesis", {"hypothesis"}),
        ("reference", "from harness import verify", {"harness"}),
        ("sharded", "def f():\n    import reference.mesh", {"reference"}),
        ("sharded", "import numpy", {"numpy"}),
        ("strategies", "from sharded.linear import X", {"sharded"}),
        ("harness", "import sharded", {"sharded"}),
        ("harness", "import rich, reference.mesh, strategies", set()),
    ],
)
def test_the_rule_sees_what_is_wrong(package: str, source: str, wrong: set[str]) -> None:
    import sys

    assert forbidden(package, ROOT / package / "new.py", source, sys.stdlib_module_names) == wrong
