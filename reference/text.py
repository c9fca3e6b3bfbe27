"""Text that comes with Python: its licence, and the documentation strings of some modules, as bytes.

It is the same in every process of one installation, and another with another version of Python. No module of it is run.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Whose documentation strings are long, and which every installation has.
_MODULES = ("difflib", "doctest", "fractions", "functools", "heapq", "random", "statistics", "textwrap")

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Text:
    """parts: what it is made of."""

    data: bytes
    parts: tuple[str, ...]

    @property
    def digest(self) -> str:
        """The first digits of its BLAKE2 hash: equal ones mean equal text."""
        return hashlib.blake2b(self.data, digest_size=6).hexdigest()

    def described(self) -> str:
        """What it is, in a line."""
        what = f"{self.parts[0]} and the documentation strings of {len(self.parts) - 1} modules"
        if self.parts[0] in _MODULES:
            what = f"the documentation strings of {len(self.parts)} modules"
        return f"{what} of Python {platform.python_version()}, {len(self.data):,} bytes, BLAKE2 {self.digest}"


@functools.cache
def text() -> Text:
    """What there is of it: an installation may lack the licence, or some sources.

    Raises ValueError where there is nothing.
    """
    found = [*_licence(), *((name, said) for name in _MODULES for said in _documentation(name))]
    if not found:
        raise ValueError(f"Python's own text is missing: expected LICENSE.txt or the source of one of {_MODULES}")
    return Text("\n\n".join(said for _, said in found).encode(), tuple(name for name, _ in found))


def _licence() -> Iterator[tuple[str, str]]:
    """Where `site` looks for what ``license()`` shows, but for the present folder: that file is anybody's."""
    here = Path(os.__file__).parent
    for path in (folder / name for folder in (here.parent, here) for name in ("LICENSE.txt", "LICENSE")):
        if path.is_file():
            yield "the licence", path.read_text("utf-8", "replace")
            return


def _documentation(name: str) -> Iterator[str]:
    """All documentation strings of a module, read from its source."""
    spec = importlib.util.find_spec(name)
    source = getattr(spec.loader, "get_source", lambda name: None)(name) if spec is not None else None
    if source is None:
        return
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, _DOCUMENTED)]
    said = [ast.get_docstring(node) for node in nodes]
    yield "\n\n".join(one for one in said if one)
