"""The explanations that a subject knows: a missing reduction, the wrong group, a bias added on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from harness.oracle.compare import different
from harness.oracle.patterns.evidence import Evidence, Values
from harness.oracle.patterns.fit import Explanation, Fit, fit
from harness.oracle.patterns.wording import of_ranks

#: More causes than these are no diagnosis.
_MOST_CAUSES = 2


def suspected(evidence: Evidence) -> str | None:
    """What a suspect predicts, exactly; where two do that cannot be told apart here, both."""
    found = fitting(evidence)
    sure = [(how, cause) for how, cause in found.fits if how.sure(evidence, found.tried)]
    causes = [cause for _, cause in sure]
    if not 0 < len(causes) <= _MOST_CAUSES:
        return None
    who = of_ranks(evidence, sure[0][0].ranks)
    return f"{who} {causes[0]}" if len(causes) == 1 else f"{who} either {causes[0]}, or {causes[1]}"


def possible(evidence: Evidence) -> tuple[str, ...]:
    """The sentences of all suspects that fit, be it by chance."""
    return tuple(f"{of_ranks(evidence, how.ranks)} {cause}" for how, cause in fitting(evidence).fits)


@dataclass(frozen=True)
class Fitting:
    """The suspects that fit, with their causes, and how many different ones were tried."""

    fits: tuple[tuple[Fit, str], ...]
    tried: int


def fitting(evidence: Evidence) -> Fitting:
    """Compares every suspect that is not right. Where some agree with the right ranks too, only those count."""
    tried: list[tuple[Values, ...]] = []
    fits: dict[str, Fit] = {}
    for suspect in evidence.known_suspects:
        values = evidence.of_suspect(suspect)
        if values is None or _same(values, evidence.wants):
            continue
        if not any(_same(values, other) for other in tried):
            tried.append(values)
        found = fit(evidence, Explanation(values))
        if found is not None:
            fits.setdefault(suspect.cause, found)
    best = {cause: found for cause, found in fits.items() if found.everywhere} or fits
    return Fitting(tuple((found, cause) for cause, found in best.items()), len(tried))


def _same(some: tuple[Values, ...], others: tuple[Values, ...]) -> bool:
    return all(not different(a, b).any() for a, b in zip(some, others, strict=True))
