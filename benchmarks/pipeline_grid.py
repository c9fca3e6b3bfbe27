"""Whether real steps of the shipped pipeline keep and wait for what the formulas say, for all p, m and v.

    python benchmarks/pipeline_grid.py --ranks 8 --micro-batches 16 --chunks 4

Every step runs on ranks, of stages of one feature; its recorded actions are what is judged: the most micro-batches in
flight on every rank, and the idle share of the actions in units of time. The formulas are those of
`reference.schedule_formulas`. Exits with 1 where one does not hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from harness.world import Pool
from reference.schedule import ScheduleCase, lists
from reference.schedule_formulas import idle_share, most_in_flight
from reference.schedule_run import Run, run
from reference.schedule_tables import Tables

WHERE = Path(__file__).resolve().parent / "pipelines.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 8), ("micro-batches", 16), ("chunks", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    steps = wrong = 0
    started = time.perf_counter()
    for p in range(1, args.ranks + 1):
        many = range(1, args.micro_batches + 1)
        cases: list[Any] = [("1f1b", 1, m) for m in many]
        cases += [(kind, v, m) for kind in ("gpipe", "interleaved") for v in range(1, args.chunks + 1) for m in many]
        with Pool(p, deadline=600) as pool:
            of_ranks: list[Any] = []
            for begin in range(0, len(cases), 16):
                found = pool.run(f"{WHERE}:recorded", cases[begin : begin + 16]).values()
                of_ranks += zip(*found, strict=True)
        for (kind, v, m), ranks in zip(cases, of_ranks, strict=True):
            case = ScheduleCase(kind, p, m, v)
            ran = run(Tables.of(lists(case, [actions for actions, _ in ranks])))
            held = [in_flight for _, in_flight in ranks]
            due = [most_in_flight(case, rank) for rank in range(p)]
            steps += 1
            if held != due or not isinstance(ran, Run) or ran.idle_share != idle_share(case):
                wrong += 1
                print(f"{case}: in flight {held}, expected {due}; {ran}, expected idle {idle_share(case)}")
        print(f"p = {p}: {len(cases)} steps, {time.perf_counter() - started:.0f} s", flush=True)
    print(f"{steps} steps, {wrong} not as the formulas say")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
