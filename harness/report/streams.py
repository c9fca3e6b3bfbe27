"""The three standard streams of the command, which may be closed, full, or a pipe that nobody reads."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO


def prepare_streams() -> None:
    """Opens what is closed, so that no file of ours gets its number, and lets every character be written."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - until the process ends
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class CannotPrint(Exception):
    """What was to be printed cannot be written; ``why`` says the system."""

    def __init__(self, why: OSError) -> None:
        super().__init__(f"cannot write to stdout: {why.strerror}")
        self.why = why

    @property
    def unread(self) -> bool:
        """Whether stdout is a pipe that nobody reads any more, as after ``| head``."""
        return isinstance(self.why, BrokenPipeError)


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Tells what goes wrong in printing apart from every other OSError."""
    try:
        yield
    except OSError as error:
        raise CannotPrint(error) from error


def give_up(stream: TextIO) -> None:
    """Lets go of what could not be written: the interpreter would try again at its end, and exit with 120."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
