"""Whether steering finds more: in how many runs a fault is found with it, and with independent draws alone.

python benchmarks/steering.py                                       # two faults of the tests, 20 seeds each
python benchmarks/steering.py builtin --seeds 1 --examples 2000     # how far right code is driven
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from harness.bench import Bench
from harness.engine import Limits, search
from harness.properties import property_of
from harness.verdict import Verdict

_FAULTS = Path(__file__).parents[1] / "tests" / "harness" / "candidates_for_tests" / "inexact.py"
_NAMES = ("worst", "slope")


@dataclass
class Seen:
    """After how many examples each run found something, and the largest statistics of the cases of each that held."""

    found: list[int | None] = field(default_factory=list)
    largest: list[list[float]] = field(default_factory=list)


def runs(candidate: str, limits: Limits, seeds: range, max_world: int, dtypes: tuple[str, ...]) -> Seen:
    subject, seen = property_of("linear"), Seen()
    facts: list[list[float]] = []

    def judge(*arguments: Any) -> Verdict:
        verdict = subject.judge(*arguments)
        if not verdict.findings:
            facts.append([verdict.facts.get(name, 0.0) for name in _NAMES])
        return verdict

    watched = replace(subject, judge=judge)
    with Bench(candidate) as bench:
        scope = bench.description.scope(max_world, dtypes or None)
        for seed in seeds:
            facts.clear()
            row = search(bench, watched, scope, replace(limits, seed=seed))
            seen.found.append(row.found_after)
            seen.largest.append(np.max(facts, axis=0).tolist())
    return seen


@click.command()
@click.argument("candidates", nargs=-1)
@click.option("--seeds", default=20, show_default=True)
@click.option("--first-seed", default=0, show_default=True)
@click.option("--examples", default=100, show_default=True)
@click.option("--share", "shares", multiple=True, default=[0.0, Limits().steered], show_default=True)
@click.option("--max-world", default=8, show_default=True)
@click.option("--dtype", "dtypes", multiple=True)
def main(
    candidates: tuple[str, ...],
    seeds: int,
    first_seed: int,
    examples: int,
    shares: tuple[float, ...],
    max_world: int,
    dtypes: tuple[str, ...],
) -> None:
    """Searches each candidate with each share of steered examples, and prints what was found."""
    table = Table("candidate", "steered", "found in", "after examples", "largest worst", "largest slope")
    for candidate in candidates or (f"{_FAULTS}:Truncated", f"{_FAULTS}:Unscaled"):
        for share in shares:
            limits = Limits(examples, shrink_seconds=0.0, steered=share)
            chosen = range(first_seed, first_seed + seeds)
            seen = runs(candidate, limits, chosen, max_world, dtypes)
            found = [n for n in seen.found if n is not None]
            largest = [f"{np.median(of):.1f}, {max(of):.1f}" for of in zip(*seen.largest, strict=True)]
            name, count = candidate.rsplit(":", 1)[-1], f"{len(found)} of {seeds}"
            table.add_row(name, f"{share:.0%}", count, ", ".join(map(str, sorted(found))), *largest)
            Console(stderr=True).print(name, f"{share:.0%}", count, seen.found)
    console = Console(width=160)
    console.print(f"{examples} examples each; of the largest statistics where nothing was found: the median, the most")
    console.print(table)


if __name__ == "__main__":
    main()
