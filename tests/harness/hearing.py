"""For tests that start programs and interrupt them."""

from __future__ import annotations

import signal


def hear_interrupts() -> None:
    """To be called in the child before it becomes the program: a shell without job control starts what it puts into the
    background deaf to SIGINT, and its children after it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
