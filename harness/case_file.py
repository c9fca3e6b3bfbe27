"""The reproducer: one line of JSON that holds candidate, subject and case."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import WrongUse
from harness.properties import PROPERTIES, property_of
from reference.codec import MalformedCase, decode, encode

FORMAT = 1


class MalformedReproducer(WrongUse):
    """Text that is no reproducer, or one of another program or version."""


@dataclass(frozen=True)
class Reproducer:
    """A case of a subject for a candidate, named as on the command line."""

    candidate: str
    subject: str
    case: Any

    def line(self) -> str:
        """One line of JSON, without a single quote, so that it fits between single quotes in a shell."""
        data = {
            "shardproof": FORMAT,
            "candidate": self.candidate,
            "subject": self.subject,
            "case": encode(self.case),
        }
        return json.dumps(data).replace("'", "\\u0027")

    def save(self, folder: Path) -> Path:
        """Writes the line to a file of its own in ``folder``, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.blake2b(self.line().encode(), digest_size=6).hexdigest()
        name = "".join(c if c.isalnum() or c in "+-_" else "-" for c in self.candidate.rpartition("/")[2])
        path = folder / f"{self.subject}-{name}-{digest}.json"
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(self.line() + "\n")
        Path(temporary).replace(path)
        return path


def read(text: str) -> Reproducer:
    """The reproducer in a line of JSON, or in a file of that name. Raises MalformedReproducer saying what is wrong."""
    stripped = text.strip()
    if not stripped.startswith("{"):
        path = Path(stripped)
        if not _is_file(path):
            raise MalformedReproducer(
                f"{stripped[:80]!r} is neither a case in JSON nor a file: pass the line that a failure printed"
            )
        stripped = path.read_text(encoding="utf-8", errors="replace").strip()
    try:
        data = json.loads(stripped)
    except (ValueError, RecursionError) as error:
        raise MalformedReproducer(f"not JSON ({error}): pass the whole line, between single quotes") from error
    if not isinstance(data, dict) or "shardproof" not in data:
        raise MalformedReproducer('this is no case of shardproof: the key "shardproof" is missing')
    if data["shardproof"] is True or data["shardproof"] != FORMAT:
        raise MalformedReproducer(f"this case has format {data['shardproof']!r}; this version reads format {FORMAT}")
    for key in ("candidate", "subject"):
        if not isinstance(data.get(key), str):
            raise MalformedReproducer(f"the key {key!r} holds {data.get(key)!r}; expected a name")
    if data["subject"] not in PROPERTIES:
        raise MalformedReproducer(f"unknown subject {data['subject']!r}; expected one of {', '.join(PROPERTIES)}")
    try:
        case: Any = decode(property_of(data["subject"]).case_type, data.get("case"))
    except MalformedCase as error:
        raise MalformedReproducer(str(error)) from error
    return Reproducer(data["candidate"], data["subject"], case)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False  # text that cannot be a path: too long, or with a NUL
