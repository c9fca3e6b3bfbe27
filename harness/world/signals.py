"""How a command ends when it is told to."""

from __future__ import annotations

import signal
from types import FrameType


class Terminated(BaseException):
    """A signal asks this process to end. No SystemExit: Hypothesis would take that for a failing test.

    ``exit_code`` is what a shell reports for the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by signal {number}")
        self.exit_code = 128 + number


#: Seconds after which a process that was told to end, and goes on, is told again.
_AGAIN = 5.0

#: And where the exception could not have passed on.
_SOON = 0.01

_told: list[int] = []


def terminate_cleanly() -> None:
    """Turns SIGTERM into Terminated and Ctrl-C into KeyboardInterrupt, so that ``with`` and ``finally`` run; for a
    command's main thread.

    Python drops an exception where it cannot pass on, in a destructor or while a module is imported by a callback of
    the interpreter: then the process would go on as if nothing had been said. So it is raised again until `ended`.

    A library must not do this to its caller, and ranks do not need it: they end with their parent, however it ends.
    """
    signal.signal(signal.SIGTERM, _leave)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background may not hear it
        signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGALRM, _leave_now)


def ended() -> None:
    """The exception has arrived where the process ends: it is not raised again."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def _leave(number: int, frame: FrameType | None) -> None:
    _told.append(number)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN, _AGAIN)
    _leave_now(number, frame)


def _leave_now(number: int, frame: FrameType | None) -> None:
    if not _told:
        return  # an alarm of somebody else's
    if _drops_exceptions(frame):
        signal.setitimer(signal.ITIMER_REAL, _SOON, _AGAIN)
    elif _told[-1] == signal.SIGINT:
        raise KeyboardInterrupt
    else:
        raise Terminated(_told[-1])


def _drops_exceptions(frame: FrameType | None) -> bool:
    """Whether the signal came inside a function that the interpreter calls, and whose exceptions it drops. Hypothesis
    measures garbage collections with such a one, and under load one signal of five came there."""
    while frame is not None:
        if frame.f_code.co_name in ("__del__", "gc_callback"):
            return True
        frame = frame.f_back
    return False
