"""The reproducer: one line of JSON that holds candidate, subject and case.

A file of it holds what the line is too short for: the folder from which the candidate's path counts, and the cases that
ran before in the same processes, where the failure did not come again without them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import reprlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import WrongUse
from harness.find import file_of
from harness.properties import PROPERTIES, property_of
from harness.source import is_file
from reference.codec import MalformedCase, decode, encode

FORMAT = 1
_EXPECTED = 'expected the line that a failure printed, {"shardproof": 1, "candidate": ..., "subject": ..., "case": ...}'
_LONGEST_NAME = 100  # of a candidate, in a file's name


class MalformedReproducer(WrongUse):
    """Text that is no reproducer, or one of another program or version."""


@dataclass(frozen=True)
class Reproducer:
    """A case of a subject for a candidate, named as on the command line. delays: the seed of the small sleeps before
    collectives, 0 for none."""

    candidate: str
    subject: str
    case: Any
    delays: int = 0

    def line(self) -> str:
        """One line of JSON, without a single quote, so that it fits between single quotes in a shell."""
        return self._json()

    def _json(self, **more: Any) -> str:
        data = {
            "shardproof": FORMAT,
            "candidate": self.candidate,
            "subject": self.subject,
            "case": encode(self.case),
        }
        if self.delays:
            data["delays"] = self.delays
        return json.dumps(data | more).replace("'", "\\u0027")

    def save(self, folder: Path, history: Sequence[str] = ()) -> Path:
        """Writes it to a file of its own in ``folder``, whole or not at all. Raises OSError where that fails.

        history: the cases that ran before it, as JSON, where they matter.
        """
        more: dict[str, Any] = {"history": list(history)} if history else {}
        file = file_of(self.candidate)
        if file is not None and not file.is_absolute():
            more["folder"] = str(Path.cwd())
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.blake2b(self.line().encode(), digest_size=6).hexdigest()
        name = re.sub(r"[^a-zA-Z0-9+_-]", "-", self.candidate.rpartition("/")[2])[-_LONGEST_NAME:]
        path = folder / f"{self.subject}-{name}-{digest}.json"
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as opened:
                opened.write(self._json(**more) + "\n")
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
        return path


def read(text: str) -> Reproducer:
    """The reproducer in a line of JSON, or in a file of that name. Raises MalformedReproducer saying what is wrong."""
    stripped = text.strip()
    path = Path(stripped)
    if from_file := is_file(path):
        try:
            stripped = path.read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            raise MalformedReproducer(f"cannot read {path}: {error.strerror}") from error
    data = _parsed(stripped, f"the text of {path}" if from_file else None)
    if not isinstance(data, dict):
        raise MalformedReproducer(f"this is JSON, but it holds {reprlib.repr(data)}: {_EXPECTED}")
    if "shardproof" not in data:
        raise MalformedReproducer(f'this is no case of shardproof, the key "shardproof" is missing: {_EXPECTED}')
    if data["shardproof"] is True or data["shardproof"] != FORMAT:
        found = reprlib.repr(data["shardproof"])
        raise MalformedReproducer(f"this case has format {found}; this version reads format {FORMAT}")
    for key in ("candidate", "subject"):
        if not isinstance(data.get(key), str):
            raise MalformedReproducer(f"the key {key!r} holds {reprlib.repr(data.get(key))}; expected a name")
    if data["subject"] not in PROPERTIES:
        found = reprlib.repr(data["subject"])
        raise MalformedReproducer(f"unknown subject {found}; expected one of {', '.join(PROPERTIES)}")
    try:
        case: Any = decode(property_of(data["subject"]).case_type, data.get("case"))
    except (MalformedCase, RecursionError) as error:
        raise MalformedReproducer(str(error)) from error
    delays = data.get("delays", 0)
    if isinstance(delays, bool) or not isinstance(delays, int) or delays < 0:
        raise MalformedReproducer(f"the key 'delays' holds {reprlib.repr(delays)}; expected a seed, 0 for no delays")
    candidate = _found_from(data.get("folder"), data["candidate"]) if from_file else data["candidate"]
    return Reproducer(candidate, data["subject"], case, delays)


def _parsed(text: str, source: str | None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if source is not None:
            raise MalformedReproducer(f"{source} is not JSON ({error}): {_EXPECTED}") from error
        if not text.startswith("{"):
            raise MalformedReproducer(f"{text[:80]!r} is neither a file nor JSON: {_EXPECTED}") from error
        raise MalformedReproducer(f"not JSON ({error}): pass the whole line, between single quotes") from error


def _found_from(folder: object, candidate: str) -> str:
    """The candidate; where its file is not to be found from here, by its path from where the failure was saved."""
    file = file_of(candidate)
    if file is None or not isinstance(folder, str) or is_file(file) or not is_file(Path(folder) / file):
        return candidate
    return str(Path(folder) / candidate)
