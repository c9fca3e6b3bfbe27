"""The run as a JSON file, for other programs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from harness.events import Event, Failure, Row, RunDone
from harness.exit_codes import say_error
from harness.printable import printable
from harness.verdict import Finding
from harness.verification import exit_code


class JsonFile:
    """Consumes events: writes the run to ``path`` when it is done, and where it was interrupted. None writes nothing.

    lost: the file could not be written, which is said on stderr; results on the terminal are results too.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.lost = False

    def __call__(self, event: Event) -> None:
        if self._path is None or not isinstance(event, RunDone):
            return
        try:
            write_json(self._path, event)
        except OSError as error:
            self.lost = True
            say_error(f"cannot write --json {self._path}: {error.strerror}")


def write_json(path: Path, done: RunDone) -> None:
    """Writes seed, rows and failures; the reproducer of a failure is the line that `shardproof replay` takes."""
    data = {
        "seed": done.seed,
        "seconds": done.seconds,
        "exit_code": exit_code(done.rows),
        "interrupted": done.interrupted,
        "libraries": {printable(candidate): library for candidate, library in done.libraries.items()},
        "rows": [_row(row) for row in done.rows],
    }
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _row(row: Row) -> dict[str, Any]:
    fields = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
    failures = [_failure(failure) for failure in row.failures]
    return fields | {"candidate": printable(row.candidate), "failures": failures}


def _failure(failure: Failure) -> dict[str, Any]:
    return {
        "kind": failure.kind,
        "reproducer": None if failure.reproducer.case is None else json.loads(failure.reproducer.line()),
        "saved": failure.saved,
        "not_saved": failure.not_saved,
        "history": list(failure.history),
        "findings": [finding_fields(finding) for finding in failure.verdict.findings],
    }


def finding_fields(finding: Finding) -> dict[str, Any]:
    """A finding as it is written."""
    # JSON has no NaN or infinity: values travel as text, exactly.
    data: dict[str, Any] = dataclasses.asdict(finding)
    return data | {key: None if data[key] is None else repr(data[key]) for key in ("got", "want", "tolerance")}
