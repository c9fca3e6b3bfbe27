"""How fast ranks start, and what a case costs beside one `torch.multiprocessing.spawn` per case.

    python benchmarks/ranks.py

Prints the time from the shell to the first judged case, warm starts of 4 and 8 ranks, and cases per second of
`verify builtin --subject linear --max-world 4` against the same cases with spawn, all measured in this one run.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from harness.bench import Bench
from harness.engine import Limits, search
from harness.find import Spec, spec_of
from harness.properties import property_of
from harness.properties.linear import on_rank
from harness.world import Pool, RankContext
from harness.world.traffic import Recorder

HELLO = f"{Path(__file__).resolve().parent / 'hello.py'}:hello"


def warm_start(ranks: int, times: int = 7) -> float:
    """Median seconds from nothing but a running rank server to the first all-reduce on so many fresh ranks."""
    seconds = []
    with Pool(ranks) as pool:
        pool.run(HELLO)
        for _ in range(times):
            started = time.perf_counter()
            pool.restart()
            pool.run(HELLO)
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def first_case(times: int = 3) -> float:
    """Median seconds of a whole `shardproof verify` that runs one case, from starting the command to its exit."""
    command = [sys.executable, "-m", "harness.cli", "verify", "builtin", "--subject", "linear", "--examples", "1"]
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def spawned(rank: int, world: int, store: str, spec: Spec, case: Any) -> None:
    """What a rank of a usual test does: start, join the group, run the case, end."""
    torch.set_num_threads(1)
    context = RankContext(rank, world, Recorder())
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    on_rank(context, spec, case)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--spawned", type=int, default=8, help="cases to run with spawn, spread over the same list")
    asked = parser.parse_args()

    print(f"from the shell to the first case: {first_case():.2f} s")
    for ranks in (4, 8):
        print(f"warm start of {ranks} ranks: {warm_start(ranks):.3f} s")

    linear, cases = property_of("linear"), []
    with Bench("builtin") as bench:
        scope = bench.description.scope(max_world=4, dtypes=None)
        check = bench.check

        def remember(subject: Any, case: Any, delays: int = 0) -> Any:
            cases.append(case)
            return check(subject, case)  # without delays: what ranks cost is measured

        bench.check = remember  # type: ignore[method-assign]
        row = search(bench, linear, scope, Limits(examples=asked.examples, seed=0))
    ours = row.examples / row.seconds
    print(f"ours: {row.examples} cases in {row.seconds:.2f} s, {ours:.0f} a second")

    some = cases[:: max(1, len(cases) // asked.spawned)][: asked.spawned]
    started = time.perf_counter()
    for case in some:
        with tempfile.TemporaryDirectory() as folder:
            args = (case.mesh.size, str(Path(folder) / "store"), spec_of("builtin"), case)
            torch.multiprocessing.spawn(spawned, args, nprocs=case.mesh.size)
    theirs = len(some) / (time.perf_counter() - started)
    print(f"spawn: {len(some)} of these cases, {theirs:.3f} a second")
    print(f"ratio: {ours / theirs:.0f}")


if __name__ == "__main__":
    main()
