"""Asks a rank what a candidate declares, so that the parent never runs a candidate's code."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

from harness.candidate import Candidate
from harness.find import Spec
from harness.properties.base import Description
from harness.session import Session, phase
from harness.world import RankContext
from reference.dtypes import format_of
from reference.mesh import AXES


def on_rank(context: RankContext, spec: Spec) -> Description:
    """The candidate's declarations. Raises CandidateRaised where they are not usable."""
    session = Session(spec)
    with phase("import"):
        missing = [name for name in session.kind.requires if version_of(name) is None]
        if missing:
            raise ModuleNotFoundError(f"{spec.text} needs {', '.join(missing)}, which is not installed")
    candidate = session.make()
    with phase("its declarations"):
        return _describe(candidate, spec)


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe(candidate: Candidate, spec: Spec) -> Description:
    from harness.properties import PROPERTIES

    supports = frozenset(_strings("supports", candidate.supports))
    known = {feature for p in PROPERTIES.values() for feature in p.features}
    if supports - known:
        raise ValueError(f"supports names {min(supports - known)!r}; expected some of {', '.join(sorted(known))}")
    dtypes = tuple(format_of(name).name for name in _strings("dtypes", candidate.dtypes))
    axes = tuple(_strings("axes", candidate.axes))
    if "tp" not in axes or set(axes) - set(AXES):
        raise ValueError(f"axes is {axes}; expected 'tp' and some of {', '.join(AXES)}")
    if candidate.uneven not in ("balanced", "chunk"):
        raise ValueError(f"uneven is {candidate.uneven!r}; expected 'balanced' or 'chunk'")
    if candidate.initialization not in ("full", "per_rank", None):
        raise ValueError(f"initialization is {candidate.initialization!r}; expected 'full', 'per_rank' or None")
    token_dims = tuple(candidate.token_dims)
    if not token_dims or not all(isinstance(n, int) and 1 <= n <= 4 for n in token_dims):
        raise ValueError(f"token_dims is {token_dims}; expected whole numbers from 1 to 4")
    return Description(
        spec=spec.text,
        name=candidate.name or type(candidate).__name__,
        requires=tuple(candidate.requires),
        versions={name: version_of(name) or "" for name in candidate.requires},
        methods=frozenset(m for p in PROPERTIES.values() for m in p.methods if candidate.offers(m)),
        dtypes=dtypes,
        axes=axes,
        supports=supports,
        uneven=candidate.uneven,
        token_dims=token_dims,
        largest_mesh=int(candidate.largest_mesh),
        meshes_at_once=max(1, int(candidate.meshes_at_once)),
        initialization=candidate.initialization,
    )


def _strings(name: str, value: Iterable[str]) -> list[str]:
    if isinstance(value, str):
        raise TypeError(f"{name} is the string {value!r}; expected several, for example ({value!r},)")
    return list(value)
