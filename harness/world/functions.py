"""How a function travels to a rank: by name, never by value, so that the rank runs the code that is on disk."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.world import wire


def pack(function: Callable[..., Any] | str) -> bytes:
    """The function for the journey: its name, or for a callable object a pickle that says where it is found.

    Raises ValueError where ranks could not import it: a lambda, a function inside a function or one of ``__main__``.
    """
    if isinstance(function, str):
        module, colon, qualname = function.rpartition(":")
        if not (colon and module and qualname):
            raise ValueError(f"the function {function!r}: expected module:name or path/to/file.py:name")
        return wire.dump(function)
    if getattr(function, "__module__", None) == "__main__":
        # A rank that ran the script again would start the whole program again.
        raise ValueError(f"ranks do not run __main__ and cannot find {describe(function)} there: move it to a module")
    try:
        return wire.dump(function)
    except Exception as error:  # what a pickle raises is anything
        raise ValueError(f"ranks cannot import {describe(function)}: {error}") from None


def unpack(data: bytes) -> Callable[..., Any]:
    """The function on the rank. Whatever its module raises comes through."""
    found = wire.load(data)
    if isinstance(found, str):
        found = resolve(found)
    if not callable(found):
        raise TypeError(f"expected a function, found {found!r}")
    return found  # type: ignore[no-any-return]


def describe(function: Callable[..., Any] | str) -> str:
    """A function's name for people, and the default label of its jobs."""
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", None)
    return f"{function.__module__}:{name}" if name else repr(function)


def resolve(name: str) -> Any:
    """What ``module:name`` or ``file.py:name`` names. AttributeError where the module has no such name."""
    module, _, qualname = name.rpartition(":")
    found: Any = _from_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _from_file(path: Path) -> ModuleType:
    path = path.resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"_shardproof_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
