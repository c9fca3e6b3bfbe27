"""The dependency rules of ARCHITECTURE.md."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator, Mapping, Sequence
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


def imported_at_once(body: Sequence[ast.stmt]) -> Iterator[str]:
    """What a module needs before it is there itself: not what is imported in functions, or for types alone."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If | ast.Try) and "TYPE_CHECKING" not in ast.unparse(node).partition("\n")[0]:
            yield from imported_at_once([*node.body, *node.orelse])


def circle(sources: Mapping[str, str]) -> list[str]:
    """Modules that need each other, by their texts. A module needs the packages that the others are in, but for its
    own, and for the top, where it is."""
    needs: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = [name.split(".") for name in imported_at_once(ast.parse(source).body)]
        found = {".".join(parts[:i]) for parts in names for i in range(2, len(parts) + 1)}
        needs[module] = (found & set(sources)) - {module, module.rpartition(".")[0]}
    try:
        list(graphlib.TopologicalSorter(needs).static_order())
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("package", sorted(OURS))
def test_no_module_needs_itself(package: str) -> None:
    """Whichever is imported first."""
    sources = {}
    for path in (ROOT / package).rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        sources[name] = path.read_text(encoding="utf-8")
    assert circle(sources) == []


def test_circles_are_seen() -> None:
    driver, refusal = "from harness.rules.refusal import REFUSED", "REFUSED = 1"
    package = {"harness.rules": "from harness.rules.scale import S", "harness.rules.refusal": refusal}
    assert circle({**package, "harness.scaling": driver, "harness.rules.scale": "import harness.scaling"})
    late = "def f():\n    import harness.scaling"
    assert not circle({**package, "harness.scaling": driver, "harness.rules.scale": late})
