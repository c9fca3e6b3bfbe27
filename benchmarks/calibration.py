"""How large the two statistics are for right code, by dtype: where the limits of the oracle come from.

python benchmarks/calibration.py --cases 10000            # sums cut and ordered in one process, up to 512 terms
python benchmarks/calibration.py --cases 1000 --ranks     # the shipped layers on real gloo ranks, as `verify` draws
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields

import click
import hypothesis
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from harness.bench import Bench
from harness.draws import register
from harness.observation import LocalTensor, Observation
from harness.oracle.expectation import CAREFUL, RUNS, expect
from harness.oracle.within import Judged, Limits, compare_within
from harness.properties import property_of
from reference.dtypes import FORMATS
from reference.layout import Whole
from reference.linear import LinearCase, LinearRecipes, Tensors, expected, tensors
from reference.mesh import Mesh
from reference.recipe import Recipe

KINDS = ("normal", "uniform", "spiky", "cancelling")


@dataclass(frozen=True)
class Sample:
    """The statistics of one right case, and what it was."""

    worst: float
    slope: float
    what: str
    condemned: bool = False


def drawn(rng: np.random.Generator, dtype: str) -> LinearCase:
    """A layer of up to 512 x 32 features on up to 8 ranks, of any data that rounds."""
    tp = int(rng.choice([1, 2, 4, 8]))
    inside = tp * max(1, 2 ** int(rng.integers(0, 10)) // tp)
    leading = tuple((int(rng.integers(1, 17)),) for _ in range(rng.integers(1, 4)))
    recipes = [Recipe(str(rng.choice(KINDS)), int(rng.integers(10**6))) for _ in fields(LinearRecipes)]
    return LinearCase(
        Mesh.of(tp=tp), "row", inside, int(rng.integers(1, 33)), leading,
        dtype=dtype, bias=True, main_grad=bool(rng.integers(2)), recipes=LinearRecipes(*recipes),
    )  # fmt: skip


def in_parts(case: LinearCase, given: Tensors, rng: np.random.Generator) -> Tensors:
    """What the layer computes in the case's dtype, every sum cut and put together again in an order of its own."""
    dtype, tp = case.format.torch_dtype, case.parallel_size
    made = {name: t.to(dtype) for name, t in given.items()}
    weight, out = made["weight"], {}
    totals: dict[str, list[torch.Tensor]] = {"weight.grad": [], "bias.grad": []}
    for m in range(len(case.leading)):
        x, g = made[f"input[{m}]"][0], made[f"output[{m}].grad"][0]
        out[f"output[{m}]"] = product(x, weight.T, tp, rng) + made["bias"]
        out[f"input[{m}].grad"] = product(g, weight, min(tp, len(weight)), rng)
        totals["weight.grad"].append(product(g.T, x, min(int(rng.choice([1, tp])), len(x)), rng))
        totals["bias.grad"].append(g.sum(0))
    for name, parts in totals.items():
        kept = torch.promote_types(dtype, torch.float32) if case.main_grad else dtype
        out[name] = summed([part.to(kept) for part in parts], rng)
    return {name: t.to(torch.float64)[None] for name, t in out.items()}


def product(a: torch.Tensor, b: torch.Tensor, n: int, rng: np.random.Generator) -> torch.Tensor:
    return summed([p @ q for p, q in zip(a.chunk(n, 1), b.chunk(n, 0), strict=True)], rng)


def summed(parts: list[torch.Tensor], rng: np.random.Generator) -> torch.Tensor:
    """One after the other, or two by two, from any first one."""
    parts = [parts[i] for i in rng.permutation(len(parts))]
    pairwise = bool(rng.integers(2))
    while len(parts) > 1:
        parts = [*parts[2:], parts[0] + parts[1]] if pairwise else [parts[0] + parts[1], *parts[2:]]
    return parts[0]


def simulated(dtype: str, cases: int, seed: int) -> Iterator[Sample]:
    rng = np.random.default_rng(seed)
    for _ in range(cases):
        case = drawn(rng, dtype)
        given = tensors(case)
        got = in_parts(case, given, rng)
        found = compared(case, given, got, RUNS, 0)
        assert all(one.finding is None or one.worst > 0 for one in found), "a tensor was not compared"
        # As a case is judged: with more runs before it is condemned.
        wrong = any(one.finding for one in found) and any(one.finding for one in compared(case, given, got, CAREFUL, 1))
        kinds = "/".join(getattr(case.recipes, f.name).kind for f in fields(LinearRecipes))
        what = f"{case.in_features} terms, {kinds}"
        yield Sample(max(one.worst for one in found), max(one.slope for one in found), what, wrong)


def compared(case: LinearCase, given: Tensors, got: Tensors, runs: int, seed: int) -> list[Judged]:
    want = expect(lambda: expected(case, given), case.format, runs=runs, seed=seed)
    return [
        compare_within(name, want[name], Whole(), "any", Mesh.of(tp=1), [observed(name, value)])
        for name, value in got.items()
    ]


def observed(name: str, value: torch.Tensor) -> Observation:
    return Observation({name: LocalTensor(value.numpy(), "any", "cpu")})


def on_ranks(dtype: str, cases: int, seed: int) -> Iterator[Sample]:
    """Cases as `verify builtin` draws them; those in which nothing rounds have no statistics."""
    subject, samples = property_of("linear"), []
    with Bench("builtin") as bench:

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=3 * cases, backend=register(), database=None, deadline=None,
            phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(subject.cases(bench.description.scope(8, [dtype])))
        def run(case: LinearCase) -> None:
            if not case.exact:  # one of three
                verdict = bench.once(subject, case).verdict
                found = verdict.facts.get("worst", np.inf), verdict.facts.get("slope", np.inf)
                kinds = "/".join(getattr(case.recipes, f.name).kind for f in fields(LinearRecipes))
                others = [f.message for f in verdict.findings]
                samples.append(Sample(*found, f"{case.mesh}, {kinds} {others or ''}", not verdict.holds))

        run()
    yield from samples


@click.command()
@click.option("--cases", default=10_000, show_default=True, help="For each dtype.")
@click.option("--dtype", "dtypes", multiple=True, default=list(FORMATS), show_default=True)
@click.option("--ranks", is_flag=True, help="On real ranks.")
@click.option("--seed", default=0, show_default=True)
def main(cases: int, dtypes: tuple[str, ...], ranks: bool, seed: int) -> None:
    """Prints the distribution of both statistics over right cases, how many are above the limits, and how many of them
    are still so after a second look with more runs, and so would be false alarms."""
    torch.set_num_threads(1)
    limits = Limits()
    table = Table("dtype", "statistic", "median", "99%", "99.9%", "max", "above the limit", "condemned", "the largest")
    for dtype in dtypes:
        started = time.monotonic()
        samples = list((on_ranks if ranks else simulated)(dtype, cases, seed))
        for name, limit in (("worst", limits.worst), ("slope", limits.slope)):
            values = np.array([getattr(sample, name) for sample in samples])
            quantiles = [f"{np.quantile(values, q):.2f}" for q in (0.5, 0.99, 0.999, 1)]
            above = int((~(values <= limit)).sum())
            condemned = str(sum(sample.condemned for sample in samples))
            table.add_row(
                dtype, name, *quantiles, f"{above} of {len(values)}", condemned, samples[int(values.argmax())].what
            )
        Console(stderr=True).print(f"{dtype}: {len(samples)} cases in {time.monotonic() - started:.0f} s")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
