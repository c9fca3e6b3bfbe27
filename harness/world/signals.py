"""How a command ends when it is told to."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn


class Terminated(BaseException):
    """A signal asks this process to end. No SystemExit: Hypothesis would take that for a failing test.

    ``exit_code`` is what a shell reports for the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by signal {number}")
        self.exit_code = 128 + number


def terminate_cleanly() -> None:
    """Turns SIGTERM into Terminated, so that ``with`` and ``finally`` run; for a command's main thread.

    A library must not do this to its caller, and ranks do not need it: they end with their parent, however it ends.
    """
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(number)
