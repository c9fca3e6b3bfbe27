"""How long an example of subject train_step takes: ranks, one process beside them with its disturbed runs, and the
judgement.

    python benchmarks/train_steps.py --examples 20
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import click
from rich.console import Console
from rich.table import Table

from harness.bench import Bench
from harness.properties.train_step import TRAIN_STEP
from reference.gpt import GptCase
from reference.ids import Ids
from reference.loss_scale import Scaling
from reference.mesh import Mesh
from reference.train_step import TrainStepCase

MODEL = GptCase(
    Mesh.of(tp=2, pp=2, dp=2), 9, 8, 2, 2, 4, depths=(1,), sizes=(1, 1), length=4, counts=(4, 2, 3), tied=True,
    schedule="1f1b", sequence_parallel=True,
)  # fmt: skip
CASE = TrainStepCase(MODEL, steps=3, optimizer="adamw", lr=2.0**-5, clip=1.0, scaling=Scaling(initial=2.0**8))


def seconds(bench: Bench, case: TrainStepCase, examples: int) -> list[float]:
    """Of each example, with other tokens each. Raises RuntimeError where one does not hold."""
    found = []
    for seed in range(examples + 1):
        began = time.monotonic()
        verdict = bench.once(TRAIN_STEP, replace(case, model=replace(case.model, ids=Ids("spread", seed)))).verdict
        if not verdict.holds:
            raise RuntimeError(f"{verdict.findings[0].message}: expected an example that holds")
        found.append(time.monotonic() - began)
    return found[1:]  # the first starts the ranks


@click.command()
@click.option("--examples", type=click.IntRange(1), default=20, show_default=True)
def main(examples: int) -> None:
    table = Table("mesh", "dtype", "steps", "ranks", "median", "fastest", "slowest", title="seconds an example")
    with Bench("builtin") as bench:
        for dtype in ("fp32", "fp16"):
            case = replace(CASE, model=replace(MODEL, dtype=dtype))
            took = seconds(bench, case, examples)
            numbers = (statistics.median(took), min(took), max(took))
            table.add_row(str(case.mesh), dtype, "3", "8", *(f"{x:.2f}" for x in numbers))
    Console().print(table)


if __name__ == "__main__":
    main()
