"""Shows that the parent computes the expected values while the ranks run.

python benchmarks/timeline.py                      # 20 linear cases of `verify builtin` on 4 ranks
python benchmarks/timeline.py --plot timeline.png  # and a picture of those that are shown; needs the dev extra
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import hypothesis
from rich.console import Console
from rich.text import Text

from harness.bench import Bench
from harness.draws import register
from harness.properties import property_of
from harness.properties.base import Property
from reference.linear import LinearCase

TIMED = f"{Path(__file__).resolve().parent / 'timed.py'}:on_rank"
WIDTH = 72
#: Cases before those that count: the first ones load code and start processes.
WARM = 3
STYLES = {"e": "yellow", "j": "magenta", "=": "green"}

Interval = tuple[float, float]


@dataclass
class Timeline:
    """When each part of one case ran, in seconds of the monotonic clock. A rank runs twice where initial parameters are
    compared with those of one process."""

    what: str
    expected: list[Interval] = field(default_factory=list)
    judging: list[Interval] = field(default_factory=list)
    ranks: list[list[Interval]] = field(default_factory=list)

    @property
    def span(self) -> Interval:
        every = [*self.expected, *self.judging, *(one for rank in self.ranks for one in rank)]
        return min(begin for begin, _ in every), max(end for _, end in every)

    @property
    def computing(self) -> float:
        """Seconds in which the parent computes expected values and tolerances."""
        return length(self.expected)

    @property
    def beside(self) -> float:
        """Those of them in which a rank runs the case."""
        return common(self.expected, merged([one for rank in self.ranks for one in rank]))

    @property
    def hidden(self) -> float:
        """Those of them that nobody waited for: the ranks had been told the case, and one was not done with it."""
        told, done = self.expected[0][0], max(rank[0][1] for rank in self.ranks)
        return common(self.expected, [(told, done)])


def length(intervals: Sequence[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def common(some: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Seconds that are in both."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in some for c, d in others)


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """The same times without overlaps."""
    made: list[Interval] = []
    for begin, end in sorted(intervals):
        if made and begin <= made[-1][1]:
            made[-1] = made[-1][0], max(end, made[-1][1])
        else:
            made.append((begin, end))
    return made


@contextmanager
def noted(where: list[Interval]) -> Iterator[None]:
    began = time.monotonic()
    yield
    where.append((began, time.monotonic()))


def timed(subject: Property, timelines: list[Timeline]) -> Property:
    """The subject whose functions write down when they run, in the last of the timelines."""

    def expected(case: Any) -> Any:
        with noted(timelines[-1].expected):
            return subject.expected(case)

    def judge(case: Any, description: Any, want: Any, worlds: Any) -> Any:
        with noted(timelines[-1].judging):
            verdict = subject.judge(case, description, want, worlds)
        for world in worlds:
            for rank, observation in enumerate(world):
                timelines[-1].ranks[rank].append(observation.facts["ran"])
        return verdict

    return replace(subject, expected=expected, judge=judge, on_rank=TIMED)


def measured(cases: int, world: int, seed: int) -> list[Timeline]:
    """Cases as `verify builtin` draws them, of those that need just so many ranks."""
    timelines: list[Timeline] = []
    subject = timed(property_of("linear"), timelines)
    with Bench("builtin") as bench:
        drawn = subject.cases(bench.description.scope(world, None)).filter(lambda case: case.mesh.size == world)

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=WARM + cases, backend=register(), database=None, deadline=None,
            phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(drawn)
        def run(case: LinearCase) -> None:
            sizes = f"{case.kind} {case.in_features} -> {case.out_features}, {len(case.leading)} micro-batches"
            exact = "exact" if case.exact else "rounds"
            timelines.append(Timeline(f"{case.mesh}, {sizes}, {case.dtype}, {exact}", ranks=[[] for _ in range(world)]))
            verdict = bench.once(subject, case).verdict
            assert verdict.holds, verdict

        run()
    return timelines[WARM:]


def lines(timeline: Timeline, width: int = WIDTH) -> list[tuple[str, str]]:
    """A label and a bar for the parent and each rank: e expected values, j judging, = a rank runs the case."""
    begin, end = timeline.span
    scale = width / (end - begin)

    def bar(marks: Sequence[tuple[str, Sequence[Interval]]]) -> str:
        cells = [" "] * width
        for mark, intervals in marks:
            for a, b in intervals:
                first = min(width - 1, int((a - begin) * scale))
                for cell in range(first, max(first + 1, round((b - begin) * scale))):
                    cells[min(cell, width - 1)] = mark
        return "".join(cells)

    parent = ("parent", bar([("e", timeline.expected), ("j", timeline.judging)]))
    return [parent, *((f"rank {number}", bar([("=", runs)])) for number, runs in enumerate(timeline.ranks))]


def print_timeline(console: Console, timeline: Timeline) -> None:
    begin, end = timeline.span
    console.print(Text(f"{timeline.what}: {1e3 * (end - begin):.1f} ms"))
    for label, bar in lines(timeline):
        marks = ((mark, STYLES.get(mark, "")) for mark in bar)
        console.print(Text.assemble(f"  {label:<7} |", *marks, "|"))
    console.print()


def plot(timelines: Sequence[Timeline], file: Path) -> None:
    """A picture of the timelines, one below the other."""
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(len(timelines), squeeze=False, figsize=(9, 2.2 * len(timelines)))
    for axes, timeline in zip(grid[:, 0], timelines, strict=True):
        bars = [(0, timeline.expected, "tab:orange", "the parent computes expected values")]
        bars += [(0, timeline.judging, "tab:purple", "the parent judges")]
        bars += [(1 + rank, runs, "tab:green", "a rank runs the case") for rank, runs in enumerate(timeline.ranks)]
        for row, intervals, color, label in bars:
            parts = [(1e3 * (begin - timeline.span[0]), 1e3 * (end - begin)) for begin, end in intervals]
            axes.broken_barh(parts, (row - 0.4, 0.8), color=color, label=label)
        ranks = [f"rank {rank}" for rank in range(len(timeline.ranks))]
        axes.set_yticks(range(1 + len(ranks)), ["parent", *ranks])
        axes.invert_yaxis()
        axes.set_title(timeline.what, fontsize=8)
    grid[-1, 0].set_xlabel("ms")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    figure.legend(once.values(), once.keys(), loc="upper center", ncols=len(once), fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    figure.savefig(file, dpi=150)


PARTS: dict[str, Callable[[Timeline], float]] = {
    "from begin to end": lambda t: t.span[1] - t.span[0],
    "expected values": lambda t: t.computing,
    "a rank running": lambda t: length(merged([one for rank in t.ranks for one in rank])),
    "judging": lambda t: length(t.judging),
}


@click.command()
@click.option("--cases", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--world", type=click.IntRange(min=1), default=4, show_default=True, help="Ranks of each case.")
@click.option("--show", type=click.IntRange(min=1), default=4, show_default=True, help="Timelines to print.")
@click.option("--plot", "picture", type=click.Path(path_type=Path, dir_okay=False), help="Also as a picture, in FILE.")
@click.option("--seed", default=0, show_default=True)
def main(cases: int, world: int, show: int, picture: Path | None, seed: int) -> None:
    """Prints timelines of some cases, and the share of the parent's computing that the ranks hide."""
    console = Console(width=None if Console().is_terminal else 160, highlight=False)
    timelines = measured(cases, world, seed)
    shown = timelines[:show]
    for timeline in shown:
        print_timeline(console, timeline)
    console.print("e: the parent computes expected values; j: it judges; =: a rank runs the case")
    means = [f"{name} {1e3 * sum(map(of, timelines)) / len(timelines):.1f} ms" for name, of in PARTS.items()]
    console.print(f"{len(timelines)} cases, on average: {', '.join(means)}")
    computing = sum(t.computing for t in timelines)
    # The rest of what is hidden is while the ranks receive the case, and wake up.
    beside, hidden = (sum(of) / computing for of in zip(*((t.beside, t.hidden) for t in timelines), strict=True))
    console.print(f"hidden behind the ranks: {hidden:.1%} of the parent's computing, {beside:.0%} while a rank runs")
    if picture is not None:
        plot(shown, picture)


if __name__ == "__main__":
    main()
