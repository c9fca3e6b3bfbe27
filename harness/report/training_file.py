"""Trainings as a JSON file, for other programs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.exit_codes import say_error
from harness.printable import printable
from harness.report.json_file import finding_fields
from harness.training.curves import Number, Trained, exit_code
from reference.codec import encode
from reference.text import text


def write_training(path: Path, runs: Sequence[Trained], seed: int) -> bool:
    """Whether the file could be written; if not, it is said on stderr."""
    held_text = text()
    data = {
        "candidate": printable(runs[0].candidate),
        "seed": seed,
        "exit_code": exit_code(runs),
        "text": {"bytes": len(held_text.data), "digest": held_text.digest, "parts": list(held_text.parts)},
        "runs": [_run(run) for run in runs],
    }
    try:
        path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        say_error(f"cannot write --json {path}: {error.strerror}")
        return False
    return True


def _run(run: Trained) -> dict[str, Any]:
    return {
        "dtype": run.dtype,
        "case": None if run.case is None else encode(run.case),
        "held": run.held,
        "refused": None if run.refused is None else printable(run.refused),
        "wrong_at": run.wrong_at,
        "undecided": run.undecided,
        "seconds": run.seconds,
        "findings": [finding_fields(finding) for finding in run.findings],
        "steps": [
            {
                "step": one.step,
                "loss": _number(one.loss),
                "norm": None if one.norm is None else _number(one.norm),
                "scale": _finite(one.scale),
                "skipped": one.skipped,
                "process_scale": one.process_scale,
                "process_skipped": one.process_skipped,
                "decided": one.decided,
            }
            for one in run.steps
        ],
        "looks": [
            {"step": one.step, "share": _finite(one.share), "loss": None if one.loss is None else _number(one.loss)}
            for one in run.looks
        ],
    }


def _number(number: Number) -> dict[str, Any]:
    """JSON has no NaN and no infinity: null."""
    return {name: _finite(getattr(number, name)) for name in ("ranks", "process", "tolerance", "share")}


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
