"""What a computed tolerance costs, beside one float64 forward and backward of the reference, and where the time goes.

    python benchmarks/cost.py

A transformer layer of hidden 64 on 16 tokens, and a linear layer of 64 x 64 on 16 tokens, on one thread. Each line is
measured in turn with the others, and the least of many rounds counts, so that other work on the machine matters little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import click
import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

import reference.linear
import reference.transformer
from harness.oracle.expectation import CAREFUL, expect
from harness.oracle.rounding import repeatable
from harness.oracle.shadows import Shadows
from reference.dtypes import FORMATS
from reference.linear import LinearCase, LinearRecipes
from reference.mesh import Mesh
from reference.recipe import Recipe
from reference.transformer import TransformerCase

Compute = Callable[[], Mapping[str, torch.Tensor | None]]


class _Nothing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation, and does nothing about it: what torch takes for that alone."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def block() -> Compute:
    case = TransformerCase(Mesh.of(tp=1), hidden=64, heads=4, kv_heads=4, ffn=256, leading=((16, 1),), dtype="fp32")
    given = reference.transformer.tensors(case)
    return lambda: reference.transformer.expected(case, given)


def linear() -> Compute:
    recipes = LinearRecipes(*(Recipe("normal", seed) for seed in range(4)))
    case = LinearCase(Mesh.of(tp=1), "column", 64, 64, ((16,),), bias=True, recipes=recipes)
    given = reference.linear.tensors(case)
    return lambda: reference.linear.expected(case, given)


def steps(compute: Compute) -> dict[str, Callable[[], object]]:
    """Each does what the one before does, and more."""
    fmt = FORMATS["fp32"]

    def seen() -> object:
        with _Nothing():
            return compute()

    def disturbed(runs: int) -> Callable[[], object]:
        def run() -> object:
            with repeatable(0), Shadows(fmt, 0, runs):
                return compute()

        return run

    return {
        "one forward and backward": compute,
        "every operation seen from Python": seen,
        "one disturbed copy beside it": disturbed(1),
        "eight disturbed copies beside it": disturbed(8),
        "all of `expect`: also a first run, and what is measured": lambda: expect(compute, fmt),
        "`expect` before a case is condemned": lambda: expect(compute, fmt, runs=CAREFUL),
    }


def least(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - started))
    return best


@click.command()
@click.option("--rounds", default=60, show_default=True)
def main(rounds: int) -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    table = Table("reference", "what runs", "ms", "times one forward and backward")
    for name, made in (("transformer layer", block()), ("linear layer", linear())):
        found = least(steps(made), rounds)
        plain = next(iter(found.values()))
        for what, ms in found.items():
            table.add_row(name, what, f"{ms:.2f}", f"{ms / plain:.1f}")
            name = ""
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
