"""Where ranks run: functions go to every rank of a world, and what happened there comes back, faithfully.

Knows nothing of cases, properties or candidates. Importing it does not import torch: the rank server does, meanwhile.
"""

from harness.world.context import RankContext
from harness.world.forkserver import warm_up
from harness.world.limits import WorldLimit, max_world
from harness.world.outcome import Blocked, Died, Ending, NotOk, Outcome, Raised, Returned
from harness.world.pool import Pending, Pool
from harness.world.pools import Pools
from harness.world.signals import Terminated, ended, terminate_cleanly
from harness.world.starting import WorldError

__all__ = [
    "Blocked",
    "Died",
    "Ending",
    "NotOk",
    "Outcome",
    "Pending",
    "Pool",
    "Pools",
    "Raised",
    "RankContext",
    "Returned",
    "Terminated",
    "WorldError",
    "WorldLimit",
    "ended",
    "max_world",
    "terminate_cleanly",
    "warm_up",
]
