"""The files and modules that names mean, and the candidates in them: read, and never run. What a user's code does is
the ranks' business."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

_CANDIDATE = "Candidate"


def is_path(text: str) -> bool:
    """Whether a name is that of a file, and not of a module."""
    return text.endswith(".py") or "/" in text


def is_file(path: Path) -> bool:
    """Whether there is such a file. No text is too strange to be asked for: too long, a NUL, links in a circle."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def search_here() -> str:
    """Puts the working folder on the path of modules, and returns it."""
    here = str(Path.cwd())
    # At the end: a harness.py, json.py or torch.py that lies here must not take the place of the one that everybody
    # means. An editable install may find our packages only after all folders of the path, so theirs comes before.
    for folder in (str(Path(__file__).parents[1]), here):
        if folder not in sys.path:
            sys.path.append(folder)
    return here


def class_is_missing(text: str) -> str | None:
    """What to say of a name that is a file or module alone, with the classes that it may mean; None of another name."""
    for named, plus, variant in ((text, "", ""), text.partition("+")):
        file = Path(named) if is_path(named) else _module_file(named)
        if file is None or not is_file(file):
            continue
        classes = [f"{named}:{name}{plus}{variant}" for name in candidates_in(file)]
        what = f"candidate {text!r}: its class is missing"
        if classes:
            return f"{what}: expected {'one of ' if len(classes) > 1 else ''}{', '.join(classes)}"
        if is_path(named) or "." in named:  # any other word may be the name of some module
            return f"{what}, and none in {file} is seen to derive from harness.Candidate: name yours, {named}:Class"
    if is_path(text):
        return f"candidate {text!r}: there is no file {Path(text).absolute()}: expected path/to/file.py:Class"
    return None


def candidates_in(file: Path) -> list[str]:
    """The public classes at the file's top level that derive from `harness.Candidate` as far as its text tells: not
    those whose base comes from another file. None of a file that cannot be read as Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    known: set[str] = set()
    found: list[str] = []
    for node in _top_level(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "harness":
            known.update(alias.asname or alias.name for alias in node.names if alias.name == _CANDIDATE)
        elif isinstance(node, ast.ClassDef) and any(_is_candidate(base, known) for base in node.bases):
            known.add(node.name)
            found.append(node.name)
    return [name for name in dict.fromkeys(found) if not name.startswith("_")]


def _top_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements in the order of the text, also under an ``if`` or ``try``, but not in classes and functions."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _top_level(node)


def _is_candidate(base: ast.expr, known: set[str]) -> bool:
    if isinstance(base, ast.Attribute):
        return base.attr == _CANDIDATE
    return isinstance(base, ast.Name) and base.id in known


def _module_file(name: str) -> Path | None:
    """The source of a module that can be imported from here. Not even its parent packages are."""
    top, *inner = name.split(".")
    if not all(part.isidentifier() for part in (top, *inner)):
        return None
    search_here()
    try:
        spec = importlib.util.find_spec(top)
        for number in range(len(inner)):
            if spec is None or spec.submodule_search_locations is None:
                return None
            full = ".".join([top, *inner[: number + 1]])
            spec = importlib.machinery.PathFinder.find_spec(full, list(spec.submodule_search_locations))
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)
