"""How a command ends when it is told to."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn


def terminate_cleanly() -> None:
    """Turns SIGTERM into SystemExit(143), so that ``with`` and ``finally`` run; for a command's main thread.

    A library must not do this to its caller, and ranks do not need it: they end with their parent, however it ends.
    """
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
