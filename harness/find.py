"""How a candidate is found: a registered name, ``pkg.module:Class`` or ``path/to/file.py:Class``, each with an optional
``+variant``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import reprlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from harness.candidate import Candidate
from harness.errors import WrongUse
from harness.source import class_is_missing, is_file, is_path, search_here

ENTRY_POINTS = "shardproof.candidates"


class UnknownCandidate(WrongUse):
    """No such candidate; the message says what was looked for and what there is."""


@dataclass(frozen=True)
class Spec:
    """A candidate as it is named on the command line. ``target`` is ``module:Class`` or ``file.py:Class``."""

    text: str
    target: str
    variant: str | None

    @property
    def module(self) -> str:
        return self.target.rpartition(":")[0]


def registered() -> dict[str, str]:
    """The registered candidates: name to ``module:Class``, ours and those of installed distributions."""
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {point.name: point.value for point in sorted(points, key=lambda p: p.name)}


def parse_spec(text: str) -> Spec:
    """The spec of a name from the command line. Nothing is imported. Raises UnknownCandidate."""
    # In a path a "+" may be part of a folder's name: the variant comes after the class.
    module, colon, rest = text.rpartition(":")
    name, plus, variant = rest.partition("+")
    base = f"{module}{colon}{name}"
    known = registered()
    if plus and not variant:
        raise UnknownCandidate(f"candidate {text!r}: a variant must follow the '+', for example builtin+F04")
    if ":" not in base:
        if base not in known:
            raise UnknownCandidate(
                class_is_missing(text)
                or f"unknown candidate {base!r}: expected one of {', '.join(known)}, "
                "or your own as pkg.module:Class or path/to/file.py:Class"
            )
        return Spec(text, known[base], variant or None)
    if not module or not name.isidentifier():
        raise UnknownCandidate(f"candidate {text!r}: expected pkg.module:Class or path/to/file.py:Class")
    if is_path(module):
        path = Path(module).absolute()
        if not is_file(path):
            raise UnknownCandidate(f"candidate {text!r}: there is no file {path}")
        path = path.resolve()
        base = f"{path}:{name}"
    else:
        _require_module(text, module)
    return Spec(text, base, variant or None)


def spec_of(candidate: str | type[Candidate]) -> Spec:
    """The spec of a name, or of a class that a rank can import by its module or from its file."""
    if isinstance(candidate, str):
        return parse_spec(candidate)
    if not (inspect.isclass(candidate) and issubclass(candidate, Candidate)):
        raise UnknownCandidate(f"{candidate!r} is not a candidate: expected a name or a subclass of harness.Candidate")
    name = candidate.__qualname__
    if not name.isidentifier():
        raise UnknownCandidate(f"{name} is defined inside a function or class: ranks can import only top-level classes")
    if candidate.__module__ == "__main__":
        path = getattr(sys.modules["__main__"], "__file__", None)
        if path is None:
            raise UnknownCandidate(
                f"{name} is defined in an interactive session: put it in a file that ranks can import"
            )
        return parse_spec(f"{Path(path).resolve()}:{name}")
    file = inspect.getsourcefile(candidate)
    if file is not None and not _is_importable(candidate.__module__, Path(file).resolve()):
        return parse_spec(f"{Path(file).resolve()}:{name}")
    return Spec(f"{candidate.__module__}:{name}", f"{candidate.__module__}:{name}", None)


def load(spec: Spec) -> type[Candidate]:
    """Imports the class. Raises what its module raises, or UnknownCandidate where it is no candidate."""
    source, _, name = spec.target.rpartition(":")
    module = _load_file(Path(source)) if is_path(source) else importlib.import_module(source)
    found = getattr(module, name, None)
    if found is None:
        there = [
            n for n, v in vars(module).items() if inspect.isclass(v) and issubclass(v, Candidate) and v is not Candidate
        ]
        raise UnknownCandidate(f"{source} has no {name!r}; candidates in it: {', '.join(there) or 'none'}")
    if not (inspect.isclass(found) and issubclass(found, Candidate)):
        raise UnknownCandidate(f"{name} in {source} is {reprlib.repr(found)}; expected a subclass of harness.Candidate")
    return found


def _is_importable(module: str, file: Path) -> bool:
    """Whether importing the name finds this file; sys.modules says nothing of other processes."""
    own = file.parent if file.name == "__init__.py" else file.with_suffix("")
    parts = module.split(".")
    if list(own.parts[-len(parts) :]) != parts:
        return False
    root = own.parents[len(parts) - 1]
    return any(Path(entry or ".").resolve() == root for entry in sys.path)


def file_of(text: str) -> Path | None:
    """The file that a candidate's name names; None where it names none."""
    module = text.rpartition(":")[0]
    return Path(module) if is_path(module) else None


def _require_module(text: str, module: str) -> None:
    """Looks for the module without importing it: importing is the ranks' business. A parent package is imported."""
    if "" in module.split(".") or not module.isprintable():
        raise UnknownCandidate(f"candidate {text!r}: {module!r} is no module: expected pkg.module:Class")
    here = search_here()
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    except Exception:  # a package that raises on import: found, and the rank will report how it fails
        return
    if found is None:
        raise UnknownCandidate(
            f"candidate {text!r}: no module {module!r} can be found from {here}; "
            "start where it can be imported, set PYTHONPATH, or name the file: path/to/file.py:Class"
        )


def _load_file(path: Path) -> ModuleType:
    """The file as a module, once per process. Its folder is on the path, as for a script."""
    name = f"shardproof_candidate_{hashlib.blake2b(os.fsencode(path), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise UnknownCandidate(f"{path} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
