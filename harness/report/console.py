"""Where results are printed: text as it is, and a failure to write it as an exception."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from harness.printable import printable
from harness.report.streams import printing


class ResultConsole(Console):
    """Raises CannotPrint. Of a pipe that nobody reads, rich itself makes an exit with 1, our code for a fault."""

    def print(self, *objects: Any, **options: Any) -> None:
        with printing():
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def result_console() -> Console:
    """The console on stdout. Into a file or a pipe lines go unfolded, not at the 80 columns of an unknown terminal."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return ResultConsole() if known else ResultConsole(width=200)


def plain(text: str, style: str = "") -> Text:
    """The text and nothing else: ``[bold]`` and ``:warning:`` in it mean nothing, and it has no control characters."""
    return Text(printable(text), style=style)


def print_line(console: Console, text: str, style: str = "") -> None:
    """One line, however long."""
    console.print(plain(text, style), soft_wrap=True, highlight=False)
