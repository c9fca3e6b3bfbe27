"""shardproof: does sharded training code compute what one process computes?

The public names. Importing this imports neither torch nor Hypothesis: the command starts its ranks first.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING

from harness.candidate import Candidate, NotOffered, Sharded
from reference.layout import Each, Partial, Split, Whole
from reference.mesh import Mesh

if TYPE_CHECKING:
    from harness.check import cases, check
    from harness.groups import device_mesh, new_group
    from harness.verify import verify

__all__ = [
    "Candidate",
    "Each",
    "Mesh",
    "NotOffered",
    "Partial",
    "Sharded",
    "Split",
    "Whole",
    "cases",
    "check",
    "device_mesh",
    "new_group",
    "verify",
]


_LATER = {
    "cases": "harness.check",
    "check": "harness.check",
    "device_mesh": "harness.groups",
    "new_group": "harness.groups",
    "verify": "harness.verify",
}


class _Package(types.ModuleType):
    """Importing the module harness.check or harness.verify must not hide the function of that name."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _LATER and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    """What needs torch or Hypothesis is imported when it is first used."""
    if name not in _LATER:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
