"""Properties in somebody's own test run: draw a case with ``@given``, have it judged, fail with the whole story."""

from __future__ import annotations

import atexit
import functools

import hypothesis
from hypothesis.strategies import SearchStrategy
from rich.console import Console

from harness.bench import Bench
from harness.candidate import Candidate
from harness.case_file import Reproducer
from harness.events import Failure
from harness.find import Spec, spec_of
from harness.properties import property_of
from harness.report.terminal import print_failure


def bench_of(candidate: str | type[Candidate]) -> Bench:
    """The ranks of a candidate, started when first asked and kept until the process ends."""
    return _bench(spec_of(candidate))


@functools.cache
def _bench(spec: Spec) -> Bench:
    bench = Bench(spec)
    atexit.register(bench.close)
    return bench


def cases(
    subject: str,
    candidate: str | type[Candidate],
    *,
    max_world: int = 4,
    dtypes: tuple[str, ...] | None = None,
) -> SearchStrategy[object]:
    """The strategy of a subject's cases within what the candidate supports, for ``@given``.

    Raises ValueError where the candidate does not offer the subject.
    """
    described = bench_of(candidate).description
    if not property_of(subject).offered(described):
        raise ValueError(f"{described.spec} does not offer the subject {subject!r}: leave it out")
    drawn: SearchStrategy[object] = property_of(subject).cases(described.scope(max_world, dtypes))
    return drawn


def check(subject: str, candidate: str | type[Candidate], case: object) -> None:
    """Runs one case on real ranks. Raises AssertionError with findings and reproducer where it does not hold; a case
    that the candidate refuses is rejected, as ``hypothesis.assume`` does."""
    trial = bench_of(candidate).check(property_of(subject), case)
    if trial.verdict.rejected is not None:
        hypothesis.reject()
    if trial.verdict.findings:
        made = Reproducer(spec_of(candidate).text, subject, case)
        console = Console(width=10_000, color_system=None)
        with console.capture() as text:
            print_failure(console, Failure(made, trial.verdict, trial.history))
        raise AssertionError("\n" + text.get())
