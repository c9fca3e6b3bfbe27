"""A candidate whose module raises."""

import no_such_library  # noqa: F401

from harness import Candidate


class Mine(Candidate):
    """Never made."""
