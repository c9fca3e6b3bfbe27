"""How many bytes of activations each stage of a pipeline keeps, beside the formula.

    python benchmarks/activation_memory.py

Measured on real ranks: what autograd saves between forward and backward, and a stage's inputs, memory that is shared
counted once, parameters not at all. With m micro-batches, a rank of p keeps, in bytes a of one micro-batch's
activations and i of its input:

    GPipe                   m a
    GPipe, recomputed       (m - 1) i + a       at its first backward, when one micro-batch is computed again
    1F1B                    min(m, p - rank) a
    1F1B, recomputed        (min(m, p - rank) - 1) i + a
"""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.world import Pool

WHERE = Path(__file__).resolve().parent / "pipelines.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("stages", 4), ("micro-batches", 8), ("hidden", 64), ("blocks", 2), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    sizes = args.hidden, args.blocks, args.tokens
    p, m = args.stages, args.micro_batches
    with Pool(p) as pool:
        one = pool.run(f"{WHERE}:stored", "gpipe", False, 1, *sizes).values()
        i = pool.run(f"{WHERE}:inputs", 1, args.hidden, args.tokens).values()[0]
        print(
            f"{p} stages of {args.blocks} blocks, {m} micro-batches of {args.tokens} tokens, hidden {args.hidden}, fp32"
        )
        print(f"of one micro-batch: {', '.join(f'{a:,}' for a in one)} bytes on ranks 0 to {p - 1}; its input {i:,}")
        for kind, recompute in (("gpipe", False), ("gpipe", True), ("1f1b", False), ("1f1b", True)):
            found = pool.run(f"{WHERE}:stored", kind, recompute, m, *sizes).values()
            flying = [m if kind == "gpipe" else min(m, p - rank) for rank in range(p)]
            due = [(n - 1) * i + a if recompute else n * a for n, a in zip(flying, one, strict=True)]
            name = f"{kind}{', recomputed' if recompute else ''}"
            print(f"{name:18} " + "  ".join(f"{x:>12,}" for x in found) + "   as the formula" * (found == due))
            if found != due:
                print(f"{'  formula':18} " + "  ".join(f"{x:>12,}" for x in due))


if __name__ == "__main__":
    main()
