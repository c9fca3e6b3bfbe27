"""Files that a command is to write."""

from __future__ import annotations

import os
from pathlib import Path

import click


def require_writable(file: Path) -> None:
    """Better now than after an hour. What can go wrong only in writing is told then."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise click.UsageError(f"--json {file}: there is no folder {folder}")
    if not os.access(file if os.path.lexists(file) else folder, os.W_OK):
        raise click.UsageError(f"--json {file}: it cannot be written to")
