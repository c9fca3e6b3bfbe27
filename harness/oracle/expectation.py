"""What must come out of a case that rounds: values, tolerances, and where rounding or overflow leaves it open."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from harness.errors import WrongUse
from harness.oracle.dataflow import Dataflow, Following, NumbersLeave
from harness.oracle.deviation import RUNS as RUNS
from harness.oracle.deviation import largest
from harness.oracle.overflow import LooksAtNumbers, Overflow
from harness.oracle.rounding import Compute, Spread, disturb, repeatable
from harness.oracle.soundness import (
    Results,
    kept,
    require_form,
    require_numbers,
    require_used,
    require_values,
    unchanged,
)
from harness.oracle.statistics import Expected
from harness.oracle.within import Limits
from reference.dtypes import FORMATS, Format

#: Disturbed runs before a case is condemned. Eight scatter: a tolerance that is five times too small comes once in some
#: hundred thousand elements.
CAREFUL = 4 * RUNS

_OWN = FORMATS["fp64"]


def expect(
    compute: Compute,
    fmt: Format,
    *,
    given: Mapping[str, torch.Tensor] | None = None,
    idle: Collection[str] = (),
    may_be_nan: Collection[str] = (),
    squares: Callable[[str], bool] = lambda name: False,
    runs: int = RUNS,
    seed: int = 0,
) -> dict[str, Expected | None]:
    """Runs the reference and its disturbances.

    compute: returns every tensor that must come out, global, float64, by name; None where there must be none. fmt: the
    format under test. given: the tensors that ``compute`` works on, by name; each must reach some result, but for the
    idle ones. may_be_nan: results that may be NaN although all that is given is finite. squares: whether a result is
    a square, or a sum of squares: its tolerance and slope are those of its root. Rounding moves a number that is nearly
    zero by s or by 3 s as it happens, and its square by s^2 or by 9 s^2, in disturbed runs as in right code.
    Raises as `harness.oracle.rounding.spread` does, and UnsoundReference where ``compute`` changes what it is given,
    ignores some of it, or returns NaN where it must not.
    """
    given = given or {}
    require_known(fmt, given, idle)
    with unchanged(given):
        found = disturb(compute, fmt, runs=runs, seed=seed, given=_busy(given, idle))
        may_overflow = _may_overflow(compute, fmt, seed) if found.near_overflow else {}
    require_numbers(given, found.want, may_be_nan)
    return {
        name: None if one is None else _expected(one, may_overflow, name, fmt, squares(name))
        for name, one in found.spreads(runs).items()
    }


def exactly(
    compute: Compute,
    *,
    given: Mapping[str, torch.Tensor] | None = None,
    idle: Collection[str] = (),
    may_be_nan: Collection[str] = (),
) -> dict[str, torch.Tensor | None]:
    """What the reference computes where nothing rounds; it is run twice. Arguments and errors as of `expect`."""
    given = given or {}
    require_known(_OWN, given, idle)
    flow = Dataflow(_busy(given, idle))
    with unchanged(given):
        with repeatable(0):
            want = kept(compute())
        with repeatable(0), NumbersLeave(flow.left), Following(flow):
            again = compute()
    require_form(want, again)
    require_values(want, again, exact=True)
    require_used(flow.unused(again.values()), again)
    require_numbers(given, want, may_be_nan)
    return want


def require_known(fmt: object, given: Collection[str], idle: Collection[str]) -> None:
    """Raises WrongUse for what is no format, and for idle names that are not given."""
    if not isinstance(fmt, Format):
        raise WrongUse(f"fmt is {fmt!r}: expected a format such as reference.dtypes.FORMATS['bf16']")
    for name in idle:
        if name not in given:
            raise WrongUse(f"idle names {name!r}: expected some of what is given: {', '.join(given) or 'nothing'}")


def _busy(given: Mapping[str, torch.Tensor], idle: Collection[str]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in given.items() if name not in idle and tensor.numel()}


def _may_overflow(compute: Compute, fmt: Format, seed: int) -> Results | None:
    """The results with NaN where they may overflow; None where the reference looks at such numbers on its way."""
    mode = Overflow(fmt, seed)
    try:
        with repeatable(seed), NumbersLeave(mode.leaving), mode:
            return dict(compute())
    except LooksAtNumbers:
        return None


def _expected(found: Spread, may_overflow: Results | None, name: str, fmt: Format, square: bool) -> Expected:
    free = found.ambiguous
    if may_overflow is None:
        free = torch.ones_like(free)
    elif (overflowed := may_overflow.get(name)) is not None:
        free = free | (overflowed.detach().isnan() & ~found.want.isnan())
    deviation = _of_square(found) if square else found.deviation
    if fmt.precision >= _OWN.precision and deviation.any():
        # The reference rounds as much as what it judges, and a disturbance of less than its last bit is lost.
        own = 2 * _OWN.unit_roundoff * found.want.abs()
        small = (found.want != 0) & (found.want.abs() < _OWN.smallest_normal)
        own = torch.where(small, _OWN.smallest, own)
        deviation = torch.where(own.isfinite(), torch.maximum(deviation, own), deviation)
    arrays = (found.want, deviation, found.residuals, free)
    want, tolerances, residuals, ambiguous = (tensor.numpy() for tensor in arrays)
    return Expected(want, tolerances, residuals, ambiguous, fmt.smallest_normal, square)


def _of_square(found: Spread) -> torch.Tensor:
    """One unit of ``worst``, with which a square is at its limit where its root is."""
    root = found.want.clamp(min=0).sqrt()
    by = largest((found.want + found.residuals).clamp(min=0).sqrt() - root)
    deviation = 2 * root * by + Limits().worst * by * by
    return torch.where(deviation.isfinite(), torch.maximum(found.deviation, deviation), found.deviation)
