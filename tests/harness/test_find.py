"""How candidates are found: by registered name, module and class, or file and class."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harness.candidate import Candidate
from harness.candidates.builtin import Builtin
from harness.errors import WrongUse
from harness.find import Spec, UnknownCandidate, load, parse_spec, registered, spec_of
from harness.source import candidates_in

SOURCE = """
from harness import Candidate
import {sibling}

class Mine(Candidate):
    value = {sibling}.VALUE

class Other(Candidate):
    pass

number = 3
class Plain: pass
"""


class Mine(Candidate):
    """A candidate that ranks can import."""


class Outer:
    class Inner(Candidate):
        """One that they cannot."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to start in, with an adapter, and modules that must not be imported; what was imported is forgotten."""
    sibling = f"sibling_of_{tmp_path.name}"
    (tmp_path / f"{sibling}.py").write_text("VALUE = 7\n")
    (tmp_path / "adapter.py").write_text(SOURCE.format(sibling=sibling))
    (tmp_path / "find_raises.py").write_text("raise RuntimeError('imported')\n")
    package = tmp_path / "find_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "inside.py").write_text("")
    (package / "alone.py").write_text(
        "raise RuntimeError('imported')\nimport harness\nclass Mine(harness.Candidate): pass\n"
    )
    (tmp_path / "circle.py").symlink_to("circle.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def test_registered_names() -> None:
    assert registered()["builtin"] == "harness.candidates.builtin:Builtin"
    assert set(registered()) >= {"builtin", "torch", "megatron-core"}
    assert parse_spec("builtin") == Spec("builtin", "harness.candidates.builtin:Builtin", None)
    assert parse_spec("builtin+F04") == Spec("builtin+F04", "harness.candidates.builtin:Builtin", "F04")
    assert parse_spec("builtin").module == "harness.candidates.builtin"
    assert load(parse_spec("builtin+F04")) is Builtin


def test_files_are_found_from_where_one_stands(folder: Path) -> None:
    target = f"{folder / 'adapter.py'}:Mine"
    assert parse_spec("adapter.py:Mine") == Spec("adapter.py:Mine", target, None)
    assert parse_spec("./adapter.py:Mine+v2") == Spec("./adapter.py:Mine+v2", target, "v2")
    assert parse_spec(target) == Spec(target, target, None)
    assert parse_spec(target).module == str(folder / "adapter.py")


def test_modules_are_found_and_not_imported() -> None:
    assert parse_spec("adapter:Mine") == Spec("adapter:Mine", "adapter:Mine", None)
    assert parse_spec("find_raises:X+v").target == "find_raises:X"
    assert parse_spec("find_package.inside:X").target == "find_package.inside:X", "how it fails is for the rank to say"
    assert not {"adapter", "find_raises"} & set(sys.modules)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown candidate '': expected one of builtin, "),
        ("bulletin", "unknown candidate 'bulletin': expected one of " + ", ".join(sorted(registered()))),
        ("bulletin", "or your own as pkg.module:Class or path/to/file.py:Class"),
        ("adapter.py", "'adapter.py': its class is missing: expected one of adapter.py:Mine, adapter.py:Other"),
        ("adapter.py+v2", "expected one of adapter.py:Mine+v2, adapter.py:Other+v2"),
        ("adapter", "candidate 'adapter': its class is missing: expected one of adapter:Mine, adapter:Other"),
        (
            "find_package.alone",
            "candidate 'find_package.alone': its class is missing: expected find_package.alone:Mine",
        ),
        ("find_package.inside", "its class is missing, and none in /"),
        ("find_package.inside", "is seen to derive from harness.Candidate: name yours, find_package.inside:Class"),
        ("find_package.missing", "unknown candidate 'find_package.missing': expected one of builtin"),
        ("find_raises", "unknown candidate 'find_raises': expected one of builtin"),
        ("./find_raises.py", "its class is missing, and none in find_raises.py is seen to derive"),
        ("missing.py", "candidate 'missing.py': there is no file /"),
        (".", "unknown candidate '.'"),
        ("+F04", "unknown candidate ''"),
        ("builtin+", "candidate 'builtin+': a variant must follow the '+', for example builtin+F04"),
        ("adapter:", "candidate 'adapter:': expected pkg.module:Class or path/to/file.py:Class"),
        (":Mine", "candidate ':Mine': expected pkg.module:Class or path/to/file.py:Class"),
        ("adapter:My Class", "candidate 'adapter:My Class': expected pkg.module:Class"),
        ("adapter:Mine()", "candidate 'adapter:Mine()': expected pkg.module:Class"),
        ("missing.py:Mine", "candidate 'missing.py:Mine': there is no file /"),
        ("no/such/file:Mine", "candidate 'no/such/file:Mine': there is no file /"),
        ("missing_module:Mine", "candidate 'missing_module:Mine': no module 'missing_module' can be found from /"),
        ("missing_module:Mine", "set PYTHONPATH, or name the file: path/to/file.py:Class"),
        ("missing_module.inside:Mine", "no module 'missing_module.inside' can be found from /"),
        (".adapter:Mine", "candidate '.adapter:Mine': '.adapter' is no module: expected pkg.module:Class"),
        ("find_package..inside:Mine", "is no module"),
        ("a\x00b:Mine", "is no module"),
        ("\ud800:Mine", "is no module"),
        ("a\x00b.py:Mine", "candidate 'a\\x00b.py:Mine': there is no file /"),
        ("\ud800.py:Mine", "there is no file /"),
        (f"{'x' * 300}.py:Mine", "there is no file /"),
        ("circle.py:Mine", "there is no file /"),
    ],
)
def test_what_cannot_be_found_is_named(text: str, message: str) -> None:
    with pytest.raises(UnknownCandidate) as caught:
        parse_spec(text)
    assert message in str(caught.value)
    assert isinstance(caught.value, WrongUse)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class A(Candidate): pass\nclass B(A): pass", ["A", "B"]),
        ("from harness.candidate import Candidate as C, Sharded\nclass A(Mixin, C): pass", ["A"]),
        ("import harness as h\nclass A(h.Candidate): pass\nclass _Base(A): pass\nclass B(_Base): pass", ["A", "B"]),
        ("try:\n    class A(Candidate): pass\nexcept E:\n    class A(Candidate): pass", ["A"]),
        ("class A(Unknown): pass\nclass B: pass", []),
        ("def f():\n    class A(Candidate): pass\nclass B:\n    class C(Candidate): pass", []),
        ("class broken(:", []),
        ("\x00", []),
    ],
)
def test_candidates_are_seen_in_the_text(folder: Path, source: str, found: list[str]) -> None:
    (folder / "seen.py").write_text(f"from harness import Candidate\n{source}")
    assert candidates_in(folder / "seen.py") == found


def test_a_candidate_of_another_library_is_none(folder: Path) -> None:
    (folder / "seen.py").write_text("from elsewhere import Candidate\nclass A(Candidate): pass")
    assert candidates_in(folder / "seen.py") == []


def test_looking_for_classes_imports_nothing(folder: Path) -> None:
    for text in ("find_package.alone", "find_package.inside", "find_raises", "find_raises.py"):
        with pytest.raises(UnknownCandidate):
            parse_spec(text)
    assert not {"find_package", "find_package.alone", "find_raises"} & set(sys.modules)
    assert candidates_in(folder / "no_such_file.py") == candidates_in(folder) == []


def test_the_spec_of_a_class_names_its_module() -> None:
    name = f"{__name__}:Mine"
    assert spec_of(Mine) == Spec(name, name, None)
    assert load(spec_of(Mine)) is Mine
    assert spec_of("builtin+F04") == parse_spec("builtin+F04")


def test_the_spec_of_a_class_whose_module_cannot_be_imported_names_its_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Loaded from a file, the module is in sys.modules of this process, where no rank finds it.
    found = load(parse_spec("adapter.py:Mine"))
    monkeypatch.setattr("inspect.getsourcefile", lambda _: str(folder / "adapter.py"))
    assert spec_of(found) == parse_spec(f"{folder / 'adapter.py'}:Mine")


def test_a_plus_in_a_folder_is_no_variant(tmp_path: Path) -> None:
    file = tmp_path / "a+b" / "adapter.py"
    file.parent.mkdir()
    file.touch()
    assert parse_spec(f"{file}:Mine").variant is None
    assert parse_spec(f"{file}:Mine+F04") == Spec(f"{file}:Mine+F04", f"{file}:Mine", "F04")


def test_the_spec_of_a_class_in_a_script_names_the_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.setattr(Mine, "__module__", "__main__")
    with pytest.raises(UnknownCandidate, match="Mine is defined in an interactive session: put it in a file"):
        spec_of(Mine)
    script.__file__ = "adapter.py"
    assert spec_of(Mine) == parse_spec(f"{folder / 'adapter.py'}:Mine")


def test_what_is_no_importable_candidate_is_refused() -> None:
    class Local(Candidate):
        """Only this function has it."""

    not_candidates: list[Any] = [int, 3, None, Mine()]
    for wrong in not_candidates:
        with pytest.raises(UnknownCandidate, match="is not a candidate: expected a name or a subclass of harness"):
            spec_of(wrong)
    for nested in (Local, Outer.Inner):
        with pytest.raises(
            UnknownCandidate, match="inside a function or class: ranks can import only top-level classes"
        ):
            spec_of(nested)


@pytest.mark.parametrize("text", ["adapter.py:Mine", "adapter:Mine"])
def test_loading_imports_once_with_the_folder_on_the_path(text: str) -> None:
    found = load(parse_spec(text))
    assert issubclass(found, Candidate)
    assert found.value == 7  # type: ignore[attr-defined]
    assert load(parse_spec(text)) is found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adapter.py:Yours", "has no 'Yours'; candidates in it: Mine, Other"),
        ("find_package.py:Yours", "has no 'Yours'; candidates in it: none"),
        ("adapter.py:number", "number in "),
        ("adapter.py:Plain", "expected a subclass of harness.Candidate"),
    ],
)
def test_what_is_not_in_the_module_is_named(folder: Path, text: str, message: str) -> None:
    (folder / "find_package.py").write_text("from harness import Candidate\n")
    with pytest.raises(UnknownCandidate) as caught:
        load(parse_spec(text))
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


def test_what_lies_here_does_not_take_the_place_of_what_everybody_means(folder: Path) -> None:
    names = ["harness", "reference", "strategies", "json", "torch", "click"]
    for name in names:
        (folder / f"{name}.py").write_text(f"raise RuntimeError('the {name} that lies here')\n")
    # As the command starts: pytest has the checkout on the path, where an editable install's finder comes last.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parents[2]]
    assert parse_spec("adapter:Mine").target == "adapter:Mine"
    # The rank server is a process of its own with the same path.
    code = f"import sys; sys.path[:] = {sys.path!r}\nimport {', '.join(names)}, adapter"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_file_whose_name_is_no_text(folder: Path) -> None:
    name = os.fsdecode(b"adapter-\xff.py")
    shutil.copy(folder / "adapter.py", folder / name)
    assert load(parse_spec(f"{name}:Other")).__name__ == "Other"


def test_what_a_module_raises_is_raised_every_time() -> None:
    for text in ("find_raises.py:Mine", "find_raises.py:Mine", "find_raises:Mine"):
        with pytest.raises(RuntimeError, match="imported"):
            load(parse_spec(text))


def test_a_file_that_is_no_python_is_refused(folder: Path) -> None:
    (folder / "adapter").write_text(SOURCE)
    with pytest.raises(UnknownCandidate, match="adapter cannot be loaded as a Python module"):
        load(parse_spec("./adapter:Mine"))
