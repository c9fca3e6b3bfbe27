"""A candidate whose module ends the process that imports it."""

import os

from harness import Candidate

os._exit(7)


class Mine(Candidate):
    """Never made."""
