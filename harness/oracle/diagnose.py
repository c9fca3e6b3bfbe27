"""What is wrong with a tensor, beyond that it is: the shape of the damage, and the cause where its pattern is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from harness.observation import Observation
from harness.oracle.compare import held_values
from harness.oracle.patterns import FACTS, PATTERNS
from harness.oracle.patterns.damage import Damage, damage
from harness.oracle.patterns.evidence import Evidence, Suspect
from harness.oracle.patterns.suspected import possible
from harness.verdict import Finding
from reference.layout import Layout
from reference.mesh import Mesh

Values = NDArray[np.float64]


#: How an explanation begins that may be a coincidence.
POSSIBLE = "possible, but too few values to be sure"

#: More explanations that are not sure than these are no help.
_MOST_POSSIBLE = 3


@dataclass(frozen=True)
class Diagnosis:
    """What came of one tensor.

    sentence: what happened, in the field's words, or None where nothing is sure. pattern: the function of
    `harness.oracle.patterns` that says it. possible: where no cause is sure, what would give just these values, of
    which there are too few to exclude a coincidence. damage: what is wrong and where.
    """

    sentence: str | None
    pattern: str | None
    possible: tuple[str, ...]
    damage: Damage

    def lines(self) -> list[str]:
        """For a report: the diagnosis, if there is one, then the damage."""
        said = [] if self.sentence is None else [f"diagnosis: {self.sentence}"]
        maybe = [f"{POSSIBLE}: {sentence}" for sentence in self.possible]
        return said + maybe + self.damage.lines()


def diagnose(evidence: Evidence) -> Diagnosis | None:
    """The most specific pattern that surely fits, and the damage. None where nothing is wrong."""
    # Faulty values may be anything, and a pattern that overflows on them does not fit.
    with np.errstate(all="ignore"):
        name, sentence = next(_sentences(evidence), (None, None))
        if sentence is None and not evidence.wrong_ranks:
            return None
        unsure = _possible(evidence) if name is None or name in FACTS else ()
        return Diagnosis(sentence, name, unsure, damage(evidence))


def _sentences(evidence: Evidence) -> Iterator[tuple[str, str]]:
    for name, pattern in PATTERNS.items():
        sentence = pattern(evidence)
        if sentence is not None:
            yield name, sentence


def _possible(evidence: Evidence) -> tuple[str, ...]:
    """What may be the cause: every suspect that fits, and the most specific other pattern that fits as well as what
    chance gives. Nothing where these are too many to help."""
    found = dict.fromkeys(possible(evidence))
    lenient = _sentences(replace(evidence, margin=0.0, suspects=tuple))
    found |= dict.fromkeys(next(([sentence] for name, sentence in lenient if name not in FACTS), []))
    return tuple(found) if len(found) <= _MOST_POSSIBLE else ()


def evidence_of(
    name: str,
    observed: Sequence[Observation],
    layout: Layout,
    mesh: Mesh,
    want: Values | None,
    tolerance: Values | None,
    dtype: str,
    *,
    others: Mapping[str, Values] | None = None,
    micro_batches: int = 1,
    counts: Mapping[str, int] | None = None,
    suspects: Callable[[], Sequence[Suspect]] = tuple,
) -> Evidence | None:
    """The evidence in what the ranks observed; arguments as in `Evidence` and `harness.oracle.compare.compare_exact`.

    None where there are no numbers to compare: the tensor must not exist, or on some rank it is missing or has another
    shape or dtype.
    """
    if want is None:
        return None
    got = held_values(name, want.shape, layout, dtype, mesh, observed)
    if isinstance(got, Finding):
        return None
    return Evidence(
        name, want, layout, mesh, tuple(got), tolerance, dtype, others or {}, micro_batches, counts or {}, suspects
    )
