"""Asks a rank what a candidate declares, so that the parent never runs a candidate's code."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

from harness.candidate import Candidate, NotOffered
from harness.errors import WrongUse
from harness.find import Spec
from harness.properties.base import Description
from harness.session import Session, phase
from harness.world import RankContext
from reference.dtypes import FORMATS
from reference.mesh import AXES


class WrongDeclaration(WrongUse):
    """What the candidate declares cannot be used; the message names the attribute, its value and what is expected.

    Wrong use, as is a class or variant that is not there: nothing of the candidate was tried yet.
    """


def on_rank(context: RankContext, spec: Spec) -> Description:
    """The candidate's declarations. Raises CandidateRaised where its code raises, else WrongDeclaration."""
    session = Session(spec)
    with phase("its declarations"):
        missing = [name for name in _strings("requires", session.kind.requires) if version_of(name) is None]
        if missing:
            named = " ".join(missing)
            raise NotOffered(f"it requires {named}, which is not installed here: pip install {named}")
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
        raise WrongDeclaration(f"supports names {min(supports - known)!r}; expected some of {', '.join(sorted(known))}")
    dtypes = tuple(_strings("dtypes", candidate.dtypes))
    if not dtypes or set(dtypes) - set(FORMATS):
        raise WrongDeclaration(f"dtypes is {dtypes}; expected some of {', '.join(FORMATS)}")
    axes = tuple(_strings("axes", candidate.axes))
    if not axes or set(axes) - set(AXES):
        raise WrongDeclaration(f"axes is {axes}; expected some of {', '.join(AXES)}")
    for p in PROPERTIES.values():
        offered = [method for method in p.methods if candidate.offers(method)]
        if offered and p.axes and not set(p.axes) & set(axes):
            one = " or ".join(map(repr, p.axes))
            raise WrongDeclaration(f"axes is {axes}; expected {one} too, over which the cases of {offered[0]} lie")
    if candidate.uneven not in ("balanced", "chunk"):
        raise WrongDeclaration(f"uneven is {candidate.uneven!r}; expected 'balanced' or 'chunk'")
    if candidate.initialization not in ("full", "per_rank", None):
        raise WrongDeclaration(f"initialization is {candidate.initialization!r}; expected 'full', 'per_rank' or None")
    token_dims: object = candidate.token_dims
    counts = tuple(token_dims) if isinstance(token_dims, Iterable) else ()
    if not counts or not all(isinstance(n, int) and 1 <= n <= 4 for n in counts):
        raise WrongDeclaration(f"token_dims is {token_dims!r}; expected whole numbers from 1 to 4, for example (2,)")
    for name in ("largest_mesh", "meshes_at_once"):
        number = getattr(candidate, name)
        if not isinstance(number, int) or number < 1:
            raise WrongDeclaration(f"{name} is {number!r}; expected a whole number of at least 1")
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
        token_dims=counts,
        largest_mesh=candidate.largest_mesh,
        meshes_at_once=candidate.meshes_at_once,
        initialization=candidate.initialization,
    )


def _strings(name: str, value: object) -> list[str]:
    if isinstance(value, str):
        raise WrongDeclaration(f"{name} is the string {value!r}; expected several, for example ({value!r},)")
    if not isinstance(value, Iterable) or not all(isinstance(text, str) for text in value):
        raise WrongDeclaration(f"{name} is {value!r}; expected several strings, for example (), or ('one', 'two')")
    return list(value)
