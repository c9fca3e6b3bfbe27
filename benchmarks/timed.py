"""What ranks run in timeline.py: a module of its own, so that they import nothing else."""

import time
from dataclasses import replace

from harness.observation import Observation
from harness.properties import linear


def on_rank(context: object, spec: object, run: object) -> Observation:
    """The linear subject's own function, and when it ran: the monotonic clock is the same in all processes (Linux)."""
    began = time.monotonic()
    seen = linear.on_rank(context, spec, run)
    return replace(seen, facts={**seen.facts, "ran": (began, time.monotonic())})
