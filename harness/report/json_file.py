"""The run as a JSON file, for other programs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from harness.events import Failure, Row, RunDone
from harness.printable import printable
from harness.verification import exit_code


def write_json(path: Path, done: RunDone) -> None:
    """Writes seed, rows and failures; the reproducer of a failure is the line that `shardproof replay` takes."""
    data = {
        "seed": done.seed,
        "seconds": done.seconds,
        "exit_code": exit_code(done.rows),
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
        "findings": [_finding(finding) for finding in failure.verdict.findings],
    }


def _finding(finding: Any) -> dict[str, Any]:
    # JSON has no NaN or infinity: values travel as text, exactly.
    data: dict[str, Any] = dataclasses.asdict(finding)
    return data | {key: None if data[key] is None else repr(data[key]) for key in ("got", "want", "tolerance")}
