"""What must come out of a case that rounds: values, tolerances, and where rounding or overflow leaves it open."""

from __future__ import annotations

import torch

from harness.oracle.overflow import Overflow
from harness.oracle.rounding import Compute, Spread, spread
from harness.oracle.statistics import Expected
from reference.dtypes import FORMATS, Format

RUNS = 8
_OWN = FORMATS["fp64"]


def expect(compute: Compute, fmt: Format, *, runs: int = RUNS, seed: int = 0) -> dict[str, Expected | None]:
    """Runs the reference and its disturbances.

    compute: returns every tensor that must come out, global, float64, by name; None where there must be none. fmt: the
    format under test. Raises as `harness.oracle.rounding.spread` does.
    """
    found = spread(compute, fmt, runs=runs, seed=seed)
    with torch.random.fork_rng(devices=[]), Overflow(fmt, seed):
        torch.manual_seed(seed)
        may_overflow = dict(compute())
    return {name: None if one is None else _expected(one, may_overflow[name], fmt) for name, one in found.items()}


def _expected(found: Spread, overflowed: torch.Tensor | None, fmt: Format) -> Expected:
    free = found.ambiguous
    if overflowed is not None:
        free = free | (overflowed.detach().isnan() & ~found.want.isnan())
    deviation = found.deviation
    if fmt.precision >= _OWN.precision and deviation.any():
        # The reference rounds as much as what it judges, and a disturbance of less than its last bit is lost.
        own = 2 * _OWN.unit_roundoff * found.want.abs()
        deviation = torch.where(own.isfinite(), torch.maximum(deviation, own), deviation)
    arrays = (found.want, deviation, found.residuals, free)
    want, tolerances, residuals, ambiguous = (tensor.numpy() for tensor in arrays)
    return Expected(want, tolerances, residuals, ambiguous, smallest_normal=fmt.smallest_normal)
