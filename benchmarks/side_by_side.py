"""The same right cases and planted faults judged three ways: false alarms and misses of each.

    python benchmarks/side_by_side.py --cases 250

Ours; torch.testing.assert_close with its defaults; and a bound on the relative norm of a tensor's error, 21 u, which is
the 0.083 published for bf16 (TTrace, arXiv 2506.09280), with the u of the dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import click
import numpy as np
import torch
from calibration import drawn, in_parts, observed
from rich.console import Console
from rich.table import Table

from harness.oracle.expectation import expect
from harness.oracle.statistics import Expected
from harness.oracle.within import compare_within
from reference.dtypes import FORMATS, Format
from reference.layout import Whole
from reference.linear import expected, tensors
from reference.mesh import Mesh

NORM = 0.083 * 2**8

Tensor = torch.Tensor


def ours(name: str, got: Tensor, want: Expected, fmt: Format) -> bool:
    return compare_within(name, want, Whole(), "any", Mesh.of(tp=1), [observed(name, got)]).finding is None


def assert_close(name: str, got: Tensor, want: Expected, fmt: Format) -> bool:
    dtype = fmt.torch_dtype
    try:
        torch.testing.assert_close(got.to(dtype), torch.from_numpy(want.want).to(dtype))
    except AssertionError:
        return False
    return True


def relative_norm(name: str, got: Tensor, want: Expected, fmt: Format) -> bool:
    exact = torch.from_numpy(want.want)
    return bool((got - exact).norm() <= NORM * fmt.unit_roundoff * exact.norm())


JUDGES: dict[str, Callable[[str, Tensor, Expected, Format], bool]] = {
    "ours": ours,
    "assert_close": assert_close,
    "relative norm": relative_norm,
}


def factor(y: Tensor, rng: np.random.Generator, want: Expected) -> Tensor:
    """1 + 2^-6, as of a gradient that is scaled a little wrongly."""
    return y * (1 + 2.0**-6)


def one_element(y: Tensor, rng: np.random.Generator, want: Expected) -> Tensor:
    """One element off by 64 times what rounding explains."""
    changed, at = y.clone().flatten(), int(rng.integers(y.numel()))
    changed[at] += 64 * float(want.tolerance.ravel()[at])
    return changed.view(y.shape)


def swapped_rows(y: Tensor, rng: np.random.Generator, want: Expected) -> Tensor:
    """The first two rows of the last but one dimension change places."""
    rows = y if y.dim() > 2 else y.unsqueeze(-1)
    return rows[:, [1, 0, *range(2, rows.shape[1])]].view(y.shape) if rows.shape[1] > 1 else y + 1


def scaled_row(y: Tensor, rng: np.random.Generator, want: Expected) -> Tensor:
    """One row doubled, as where a replicated part is summed twice."""
    changed = y.clone()
    changed[:, int(rng.integers(y.shape[1]))] *= 2
    return changed


FAULTS = (factor, one_element, swapped_rows, scaled_row)


@click.command()
@click.option("--cases", default=250, show_default=True, help="For each dtype; each is judged right and with a fault.")
@click.option("--seed", default=0, show_default=True)
def main(cases: int, seed: int) -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    table = Table("dtype", "judge", "false alarms", *(f"misses: {fault.__name__}" for fault in FAULTS))
    for dtype, fmt in FORMATS.items():
        rng, alarms, misses, planted = np.random.default_rng(seed), Counter(), Counter(), Counter()
        for number in range(cases):
            case = drawn(rng, dtype)
            given = tensors(case)
            want = expect(lambda case=case, given=given: expected(case, given), fmt)
            got = in_parts(case, given, rng)
            name = str(rng.choice([n for n, e in want.items() if e is not None and np.abs(e.want).max() > 0]))
            target, fault = want[name], FAULTS[number % len(FAULTS)]
            assert target is not None
            kept = torch.float32 if case.main_grad and name in ("weight.grad", "bias.grad") else fmt.torch_dtype
            wrong = fault(got[name], rng, target).to(torch.promote_types(kept, fmt.torch_dtype)).to(torch.float64)
            planted[fault.__name__] += 1
            for judge, holds in JUDGES.items():
                right = all(holds(n, value, e, fmt) for n, value in got.items() if (e := want[n]) is not None)
                alarms[judge] += not right
                misses[judge, fault.__name__] += holds(name, wrong, target, fmt)
        for judge in JUDGES:
            found = [f"{misses[judge, f.__name__]} of {planted[f.__name__]}" for f in FAULTS]
            table.add_row(dtype, judge, f"{alarms[judge]} of {cases}", *found)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
