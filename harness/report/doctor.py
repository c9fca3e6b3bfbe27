"""What is installed, what this machine allows, and whether ranks start."""

from __future__ import annotations

import os
import platform
import time

import torch
from rich.console import Console
from rich.table import Table

from harness.bench import Bench, CandidateUnusable
from harness.describe import version_of
from harness.errors import WrongUse
from harness.find import registered
from harness.report.console import plain
from harness.world import Pool, RankContext, max_world

LIBRARIES = ("shardproof", "torch", "numpy", "hypothesis", "pytest", "megatron-core")


def on_rank(context: RankContext) -> int:
    """A sum over all ranks: the least that a rank must be able to do."""
    one = torch.ones(1, dtype=torch.int64)
    torch.distributed.all_reduce(one)
    return int(one)


def print_doctor(console: Console) -> int:
    """Prints the findings. Returns the exit code: 0 all is well, 2 ranks do not work here."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in LIBRARIES:
        table.add_row(name, version_of(name) or "not installed")
    limit = max_world()
    table.add_row("cores", str(os.cpu_count()))
    table.add_row("largest world", f"{limit.ranks} ranks ({limit.why})")
    table.add_row("gloo", "yes" if torch.distributed.is_gloo_available() else "no")
    table.add_row("CUDA devices", str(torch.cuda.device_count()))
    code = 0
    for ranks in (2, 4):
        if ranks <= limit.ranks:
            text, fine = _start(ranks)
            table.add_row(f"{ranks} ranks", plain(text))
            code = code if fine else 2
    for name in registered():
        table.add_row(plain(f"candidate {name}"), plain(_usable(name)))
    console.print(table)
    return code


def _start(ranks: int) -> tuple[str, bool]:
    started = time.monotonic()
    with Pool(ranks) as pool:
        outcome = pool.run(on_rank, label="doctor")
        if outcome.kind != "ok":
            return f"do not work: {outcome.kind}: {outcome.ranks[0]}", False
        seconds = time.monotonic() - started
    right = all(total == ranks for total in outcome.values())
    return f"{'work' if right else 'give wrong sums'}, {seconds:.2f} s from start to first sum", right


def _usable(name: str) -> str:
    try:
        with Bench(name) as bench:
            subjects = sorted(bench.description.methods)
            return f"usable: {', '.join(subjects)}"
    except CandidateUnusable as error:
        return f"not usable: {error.findings[0].message}"
    except WrongUse as error:
        return f"not usable: {error}"
