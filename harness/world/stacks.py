"""Makes the stacks that faulthandler wrote readable: without the frames that every rank has."""

from __future__ import annotations

import re

_OURS = ("harness/world/worker.py", "harness/world/server.py")
_RECORDER = "harness/world/traffic.py"
_FRAME = re.compile(r'  File "(?P<file>.*)", line \S+ in ')
NO_STACK = "(no stack: the rank did not answer the signal)"


def trimmed(text: str) -> str:
    """The stacks of all threads, most recent call first, without our own frames at either end."""
    threads = [_thread(block) for block in text.strip().split("\n\n")]
    kept = [block for block in threads if block]
    return "\n\n".join(kept) or NO_STACK


def _thread(block: str) -> str:
    lines = []
    for line in block.splitlines():
        frame = _FRAME.match(line)
        file = frame["file"] if frame else ""
        if file.endswith(_OURS):
            break  # whatever called us is the same on every rank
        if not file.endswith(_RECORDER):
            lines.append(line)
    return "\n".join(lines) if any(map(_FRAME.match, lines)) else ""
