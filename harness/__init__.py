"""shardproof: does sharded training code compute what one process computes?

The public names; importing them imports neither Hypothesis nor the reports.
"""

from harness.candidate import Candidate, NotOffered, Sharded
from harness.groups import device_mesh, new_group
from reference.layout import Each, Partial, Split, Whole
from reference.mesh import Mesh

__all__ = [
    "Candidate",
    "Each",
    "Mesh",
    "NotOffered",
    "Partial",
    "Sharded",
    "Split",
    "Whole",
    "check",
    "device_mesh",
    "new_group",
    "verify",
]


def __getattr__(name: str) -> object:
    """``verify`` and ``check`` on first use: ranks and adapters need neither."""
    if name == "verify":
        from harness.verify import verify

        return verify
    if name == "check":
        from harness.check import check

        return check
    raise AttributeError(f"module 'harness' has no attribute {name!r}")
