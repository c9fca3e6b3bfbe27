"""Bytes of an all-reduce on real gloo ranks, drawn: what each rank sends, and what the busiest link carries.

    python benchmarks/traffic_picture.py                      # docs/reduction_traffic.svg, and the table

Every number is from the recorded traffic of up to 16 ranks; the dashed lines are the formulas.
"""

from __future__ import annotations

from pathlib import Path

import click
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from harness.world import Pool

HERE = Path(__file__).resolve().parent
RANK_FUNCTION = f"{HERE / 'reductions.py'}:recorded"
PICTURE = HERE.parent / "docs" / "reduction_traffic.svg"
STYLES = {
    "ring": ("o-", "#1f77b4"),
    "halving_doubling": ("s-", "#2ca02c"),
    "tree": ("^-", "#ff7f0e"),
    "parameter_server": ("D-", "#d62728"),
}
#: By ranks and algorithm: the bytes that each rank sends and receives, and the seconds of the slowest.
Measured = dict[int, dict[str, tuple[list[int], list[int], float]]]


def measure(most: int, elements: int) -> Measured:
    found: Measured = {}
    for ranks in range(2, most + 1):
        with Pool(ranks, deadline=60.0) as pool:
            each = pool.run(RANK_FUNCTION, elements).values()
        found[ranks] = {
            name: ([one[name][0] for one in each], [one[name][1] for one in each], max(one[name][2] for one in each))
            for name in STYLES
        }
    return found


def draw(found: Measured, size: int, path: Path) -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "shardproof", "font.size": 9, "svg.fonttype": "none"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    n = list(found)
    for name, (style, colour) in STYLES.items():
        label = name.replace("_", " ")
        left.plot(n, [max(found[k][name][0]) / size for k in n], style, color=colour, ms=4, label=label)
        link = [max(s + r for s, r in zip(*found[k][name][:2], strict=True)) / size for k in n]
        right.plot(n, link, style, color=colour, ms=4, label=label)
    left.plot(n, [2 * (k - 1) / k for k in n], "k--", lw=0.8, label="2 (n - 1)/n")
    right.plot(n, [2 * (k - 1) for k in n], "k--", lw=0.8, label="2 (n - 1)")
    left.set(title="the most that one rank sends", xlabel="ranks n", ylabel="bytes, in units of the tensor's S")
    right.set(title="the busiest link, both ways (server: rank 0)", xlabel="ranks n")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def show(found: Measured, size: int) -> None:
    table = Table(
        "ranks", "algorithm", "least sent / S", "most sent / S", "most received / S", "busiest link / S", "ms"
    )
    for ranks, by_name in found.items():
        for name, (sent, received, seconds) in by_name.items():
            link = max(s + r for s, r in zip(sent, received, strict=True))
            numbers = [f"{count / size:.4f}" for count in (min(sent), max(sent), max(received), link)]
            table.add_row(str(ranks), name, *numbers, f"{1e3 * seconds:.1f}")
    Console().print(table)


@click.command()
@click.option("--most", default=16, show_default=True, help="Up to so many ranks.")
@click.option("--elements", default=5040, show_default=True, help="Of the fp32 tensor.")
@click.option(
    "--to", "path", default=str(HERE.parent / "docs" / "reduction_traffic.svg"), type=click.Path(path_type=Path)
)
def main(most: int, elements: int, path: Path) -> None:
    """Measures, prints and draws."""
    found = measure(most, elements)
    show(found, 4 * elements)
    draw(found, 4 * elements, path)
    print(f"drawn: {path}")


if __name__ == "__main__":
    main()
