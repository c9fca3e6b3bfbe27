"""The rounding model: how far rounding alone can move what a reference computes.

The method is Monte Carlo arithmetic (Parker, "Monte Carlo Arithmetic", UCLA CSD-970002, 1997) applied to whole tensors,
with disturbances that do not depend on the order of summation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.errors import WrongUse
from harness.oracle.dataflow import Dataflow, NumbersLeave, tensors_in
from harness.oracle.deviation import Spread as Spread
from harness.oracle.deviation import measure
from harness.oracle.disturbing import Disturbing, Operation
from harness.oracle.noise import Earlier, Rounder
from harness.oracle.shadows import NeedsSeparateRuns, NumbersStayInside, Shadows
from harness.oracle.soundness import Results, Tensors, kept, require_form, require_used, require_values
from reference.dtypes import Format

Compute = Callable[[], Results]


class Rounding(Disturbing):  # type: ignore[no-untyped-call]
    """Disturbs the results themselves: one disturbed run of a computation. earlier: shared with the other runs."""

    def __init__(self, fmt: Format, seed: int, flow: Dataflow | None = None, earlier: Earlier | None = None) -> None:
        super().__init__(fmt, seed, flow)
        self._earlier = earlier

    def disturbed(self, operation: Operation) -> Any:
        if operation.rule.fused is not None:
            rounder = Rounder(self.noise, operation.format, 0, self._earlier)
            return operation.rule.fused(rounder, *operation.args, **operation.kwargs)
        if operation.exact:
            return operation.run()
        scales = operation.scales()
        result = operation.run()
        tensors = tensors_in(result)
        for tensor, disturbance in zip(tensors, operation.disturbances(tensors, scales), strict=True):
            if disturbance is None:
                continue
            tensor.addcmul_(self.noise.draw(disturbance.shape, tensor.dtype), disturbance.own)
            if disturbance.common:
                tensor.mul_(self.noise.factor((), disturbance.common, operation.format))
        return result


def spread(compute: Compute, fmt: Format, *, runs: int = 8, seed: int = 0) -> dict[str, Spread | None]:
    """Runs ``compute`` undisturbed, and ``runs`` times with every operation disturbed as arithmetic in ``fmt`` would.

    compute: makes its tensors anew at each call, in float64 on the CPU, and returns results by name, gradients too;
    None stays None. It may call ``backward()``. What it draws from torch's random numbers is decided by ``seed`` too.
    Raises UnknownOperation where an operation is used of which nobody said how it rounds, UnsoundReference where
    ``compute`` is not the same at each call, and WrongUse where ``runs`` is not at least 1.
    """
    return disturb(compute, fmt, runs=runs, seed=seed).spreads(runs)


@dataclass(frozen=True)
class Disturbed:
    """want: what is computed undisturbed. copies: the disturbed values of each tensor, [K, *shape]; None for what no
    rounding reaches. near_overflow: whether rounding or the order of a sum may decide that something overflows."""

    want: Tensors
    copies: Tensors
    near_overflow: bool

    def spreads(self, runs: int) -> dict[str, Spread | None]:
        return {
            name: None if value is None else measure(value, self.copies[name], runs)
            for name, value in self.want.items()
        }


def disturb(
    compute: Compute, fmt: Format, *, runs: int, seed: int, given: Mapping[str, torch.Tensor] | None = None
) -> Disturbed:
    """As `spread`, before anything is measured. given: tensors that ``compute`` reads and that must reach its results;
    raises UnsoundReference where one does not."""
    if runs < 1:
        raise WrongUse(f"runs {runs} must be at least 1")
    with repeatable(seed):
        want = kept(compute())
    try:
        return _together(compute, want, fmt, runs, seed, given or {})
    except NeedsSeparateRuns:
        return _separately(compute, want, fmt, runs, seed, given or {})


def _together(
    compute: Compute, want: Tensors, fmt: Format, runs: int, seed: int, given: Mapping[str, torch.Tensor]
) -> Disturbed:
    flow = Dataflow(given)
    shadows = Shadows(fmt, seed, runs, flow if given else None)
    with repeatable(seed), NumbersStayInside(shadows), shadows:
        got = compute()
    require_form(want, got)
    _require_same(compute, want, got if not shadows.rewrote else None, seed)
    require_used(flow.unused(got.values()), got)
    copies = {name: None if value is None else shadows.of(value) for name, value in got.items()}
    return Disturbed(want, copies, shadows.near_overflow())


def _separately(
    compute: Compute, want: Tensors, fmt: Format, runs: int, seed: int, given: Mapping[str, torch.Tensor]
) -> Disturbed:
    made: dict[str, list[torch.Tensor]] = {name: [] for name, value in want.items() if value is not None}
    flow, earlier = Dataflow(given), Earlier()
    _require_same(compute, want, None, seed)
    for k in range(runs):
        seen = flow if given and not k else None
        earlier.begin()
        with repeatable(seed), NumbersLeave(flow.left), Rounding(fmt, seed * runs + k, seen, earlier):
            got = compute()
        if seen is not None:
            require_used(flow.unused(got.values()), got)
        got = kept(got)
        require_form(want, got)
        for name, values in made.items():
            value = got[name]
            assert value is not None
            values.append(value)
    return Disturbed(want, {name: torch.stack(made[name]) if name in made else None for name in want}, True)


def _require_same(compute: Compute, want: Tensors, again: Results | None, seed: int) -> None:
    """Raises UnsoundReference if another undisturbed run differs; again: one that is there already."""
    if again is None:
        with repeatable(seed):
            again = kept(compute())
        require_form(want, again)
    require_values(want, again)


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """The same random numbers in every run, and none of the attention kernels that cannot be taken apart."""
    fast, state = torch.backends.mha.get_fastpath_enabled(), torch.get_rng_state()
    with sdpa_kernel(SDPBackend.MATH):
        # torch.manual_seed would seed every device there is, which takes longer than many a reference.
        torch.default_generator.manual_seed(seed)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            torch.set_rng_state(state)
