"""Properties in somebody's own test run: draw a case with ``@given``, have it judged, fail with the whole story."""

from __future__ import annotations

import atexit
import json
import reprlib

import hypothesis
from hypothesis.strategies import SearchStrategy
from rich.console import Console

from harness.bench import Bench, Trial, checked
from harness.candidate import Candidate
from harness.case_file import Reproducer
from harness.draws import register
from harness.errors import WrongUse
from harness.events import Failure
from harness.find import Spec, spec_of
from harness.properties import property_of
from harness.properties.base import Description
from harness.report.terminal import print_failure
from harness.steering import aim
from harness.verification import require_limits
from reference.codec import encode


class _Benches:
    """The ranks of one candidate at a time: idle ranks are not free, since every gloo group polls."""

    def __init__(self) -> None:
        self._bench: Bench | None = None
        self._described: dict[Spec, Description] = {}
        self._known: dict[tuple[Spec, str, str], Trial] = {}

    def of(self, spec: Spec) -> Bench:
        """The candidate's ranks; those of another candidate end."""
        if self._bench is None or self._bench.spec != spec:
            self.close()
            self._bench = Bench(spec)
            self._described[spec] = self._bench.description
        return self._bench

    def judge(self, spec: Spec, subject: str, case: object) -> Trial:
        """The verdict on a case. The first failure of a candidate is confirmed in fresh processes; after that, what
        Hypothesis tries in shrinking is believed, and remembered for its replays."""
        key = spec, subject, json.dumps(encode(case))
        if key in self._known:
            return self._known[key]
        bench, of = self.of(spec), property_of(subject)
        first = next((trial for known, trial in self._known.items() if known[:2] == key[:2]), None)
        trial = checked(bench, of, case, "some") if first is None else bench.once(of, case, first.delays)
        if trial.verdict.findings and trial.verdict.kind != "flaky":
            self._known[key] = trial
        return trial

    def description(self, spec: Spec) -> Description:
        return self._described[spec] if spec in self._described else self.of(spec).description

    def close(self) -> None:
        if self._bench is not None:
            self._bench.close()
        self._bench = None


register()  # so that settings(backend="shardproof") is known to whoever draws our cases
_BENCHES = _Benches()
atexit.register(_BENCHES.close)


def cases(
    subject: str,
    candidate: str | type[Candidate],
    *,
    max_world: int = 8,
    dtypes: tuple[str, ...] | None = None,
) -> SearchStrategy[object]:
    """The strategy of a subject's cases within what the candidate supports, for ``@given``.

    Raises ValueError where the candidate does not offer the subject, or has none of the dtypes, and WrongUse for limits
    that cannot be used.
    """
    require_limits(max_world, dtypes)
    described = _BENCHES.description(spec_of(candidate))
    if not property_of(subject).offered(described):
        raise ValueError(f"{described.spec} does not offer the subject {subject!r}: leave it out")
    scope = described.scope(max_world, dtypes)
    if property_of(subject).uses_dtype and not scope.dtypes:
        has = ", ".join(described.dtypes)
        raise ValueError(f"{described.spec} has none of the dtypes {', '.join(dtypes or ())}: expected some of {has}")
    drawn: SearchStrategy[object] = property_of(subject).cases(scope)
    return drawn


def check(subject: str, candidate: str | type[Candidate], case: object) -> None:
    """Runs one case on real ranks. Raises AssertionError with findings and reproducer where it does not hold; a case
    that the candidate refuses is rejected, as ``hypothesis.assume`` does. Raises WrongUse for what is no case."""
    expected = property_of(subject).case_type
    if not isinstance(case, expected):
        raise WrongUse(
            f"the case is {reprlib.repr(case)}: expected a {expected.__name__}, as cases({subject!r}, ...) draws it, "
            "or as harness.case_file.read(line).case reads it from the line that a failure printed"
        )
    trial = _BENCHES.judge(spec_of(candidate), subject, case)
    if trial.verdict.rejected is not None:
        hypothesis.reject()
    aim(trial.verdict)  # Hypothesis then tries cases near those where rounding is largest
    if trial.verdict.findings:
        made = Reproducer(spec_of(candidate).text, subject, case, trial.delays)
        console = Console(width=10_000, color_system=None)
        with console.capture() as text:
            print_failure(console, Failure(made, trial.verdict, trial.history))
        raise AssertionError("\n" + text.get())
