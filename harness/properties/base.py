"""What a subject is to the harness: how cases are drawn, run on ranks, and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hypothesis.strategies import SearchStrategy

from harness.observation import Observation
from harness.verdict import Verdict
from reference.layout import Rule
from strategies.scope import Scope


@dataclass(frozen=True)
class Description:
    """What a candidate declares, as plain data: a rank loads the class, the parent sees only this."""

    spec: str
    name: str
    requires: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    methods: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    supports: frozenset[str] = frozenset()
    uneven: Rule = "balanced"
    token_dims: tuple[int, ...] = (1, 2, 3)
    largest_mesh: int = 10**6
    meshes_at_once: int = 1
    initialization: Literal["full", "per_rank"] | None = None

    def scope(self, max_world: int, dtypes: Sequence[str] | None) -> Scope:
        """What may be drawn for this candidate within the user's limits."""
        wanted = self.dtypes if dtypes is None else tuple(d for d in self.dtypes if d in dtypes)
        return Scope(
            max_world=max_world,
            largest_mesh=self.largest_mesh,
            dtypes=wanted,
            axes=self.axes,
            parts=self.methods,
            features=self.supports,
            uneven=self.uneven,
            token_dims=self.token_dims,
            checks_initialization=self.initialization is not None,
        )


#: The observations of one run: one a rank.
World = Sequence[Observation]


@dataclass(frozen=True)
class Property:
    """A subject: cases as data, and the functions that draw, run and judge them.

    case_type: the dataclass. methods: the candidate's methods; one of them is enough to offer the subject. features:
    the optional features by name, with a line each. cases: the strategy. world: how many ranks a case needs.
    on_rank: ``module:function`` run on every rank as ``function(context, spec, case)``, returning an Observation.
    simpler: ``simpler(case, scope)`` proposes simpler cases, for the last step of shrinking.
    runs: the cases to run for one case, each in a world of its own (default: itself).
    expected: what one process computes, made in the parent while the ranks run. careful: the same with more effort, for
    the last word on a case whose numbers are little beyond what is expected; None where nothing is estimated.
    judge: ``judge(case, description, expected, worlds)`` gives the verdict, its findings gravest first.
    carried_on: ``carried_on(case, world)`` is what new processes, that have seen nothing, are to carry on with when the
    ranks of a run have done their part: they are given it as a last argument, and what they return counts; None where
    the run is done.
    stuck: ``stuck(case, told)`` says, of a run that ended as a hang, a crash or an exception, how far the ranks were,
    from what each told last (`RankContext.tell`); None where that says nothing.
    axes: over which cases lie, so that a candidate must be able to deal with one of them; () where any will do.
    uses_dtype: whether ``--dtype`` restricts it. preload: modules that ranks may import on their way, and each anew
    where they are not there when it starts.
    """

    subject: str
    case_type: type
    methods: tuple[str, ...]
    features: Mapping[str, str]
    cases: Callable[[Scope], SearchStrategy[Any]]
    simpler: Callable[[Any, Scope], Iterable[Any]]
    world: Callable[[Any], int]
    on_rank: str
    expected: Callable[[Any], Any]
    judge: Callable[[Any, Description, Any, Sequence[World]], Verdict]
    careful: Callable[[Any], Any] = lambda case: None
    runs: Callable[[Any, Description], Sequence[Any]] = lambda case, description: (case,)
    carried_on: Callable[[Any, World], Any] = lambda case, world: None
    stuck: Callable[[Any, Sequence[str | None]], str | None] = lambda case, told: None
    axes: tuple[str, ...] = ()
    uses_dtype: bool = True
    preload: tuple[str, ...] = ()

    def offered(self, description: Description) -> bool:
        return any(method in description.methods for method in self.methods)
