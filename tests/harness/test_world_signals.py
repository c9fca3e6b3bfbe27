"""An interrupt that Python drops is raised again."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from hearing import hear_interrupts

SCRIPT = """
import os, sys, time, weakref
from harness.world import Terminated, ended, signals, terminate_cleanly

signals._AGAIN = float(sys.argv[2])
terminate_cleanly()

def told(*_):
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(0.1)

class Plain: pass

class Deleted:
    def __del__(self): told()

try:
    made = Deleted() if sys.argv[3] == "deleted" else Plain()
    seen = weakref.ref(made, told) if sys.argv[3] == "seen" else None
    del made
    time.sleep(2)
    print("went on")
except (KeyboardInterrupt, Terminated) as error:
    ended()
    time.sleep(0.5)  # not raised any more
    print(type(error).__name__)
"""


def told(number: signal.Signals, again: float, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, str(int(number)), str(again), how]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, preexec_fn=hear_interrupts)


SIGNALS = [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "Terminated")]


@pytest.mark.parametrize(("number", "name"), SIGNALS)
@pytest.mark.parametrize("again", [0.2, 60.0])
def test_an_interrupt_that_was_dropped_is_raised_again(number: signal.Signals, name: str, again: float) -> None:
    done = told(number, again, "seen")
    assert "Exception ignored in" in done.stderr
    assert done.stdout == (f"{name}\n" if again < 1 else "went on\n"), done.stderr


@pytest.mark.parametrize(("number", "name"), SIGNALS)
def test_an_interrupt_that_would_be_dropped_waits_a_moment(number: signal.Signals, name: str) -> None:
    done = told(number, 60.0, "deleted")
    assert (done.stdout, done.stderr) == (f"{name}\n", "")
