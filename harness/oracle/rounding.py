"""The rounding model: how far rounding alone can move what a reference computes.

The method is Monte Carlo arithmetic (Parker, "Monte Carlo Arithmetic", UCLA CSD-970002, 1997) applied to whole tensors,
with disturbances that do not depend on the order of summation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.errors import WrongUse
from harness.oracle.deviation import Spread as Spread
from harness.oracle.deviation import measure
from harness.oracle.disturbing import Disturbing, Operation, tensors_in
from harness.oracle.noise import Rounder
from harness.oracle.shadows import NeedsSeparateRuns, NumbersStayInside, Shadows
from reference.dtypes import Format

Results = Mapping[str, torch.Tensor | None]
Compute = Callable[[], Results]
Tensors = dict[str, torch.Tensor | None]

#: How far two runs of one computation in float64 may differ, relative to the largest value: matrix products may depend
#: on where their arguments lie in memory.
_SAME = 2.0**-20


class Rounding(Disturbing):  # type: ignore[no-untyped-call]
    """Disturbs the results themselves: one disturbed run of a computation."""

    def disturbed(self, operation: Operation) -> Any:
        if operation.rule.fused is not None:
            rounder = Rounder(self.noise, operation.format, lead=0)
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
    Raises UnknownOperation where an operation is used of which nobody said how it rounds, and WrongUse where
    ``compute`` is not the same at each call, or ``runs`` is not at least 1.
    """
    if runs < 1:
        raise WrongUse(f"runs {runs} must be at least 1")
    with _repeatable(seed):
        want = _kept(compute())
    copies = _disturbed(compute, want, fmt, runs, seed)
    return {name: None if value is None else measure(value, copies[name], runs) for name, value in want.items()}


def _disturbed(compute: Compute, want: Tensors, fmt: Format, runs: int, seed: int) -> Tensors:
    """The disturbed values of each tensor, [K, *shape]; None for what no rounding reaches."""
    try:
        return _together(compute, want, fmt, runs, seed)
    except NeedsSeparateRuns:
        return _separately(compute, want, fmt, runs, seed)


def _together(compute: Compute, want: Tensors, fmt: Format, runs: int, seed: int) -> Tensors:
    shadows = Shadows(fmt, seed, runs)
    with _repeatable(seed), NumbersStayInside(shadows), shadows:
        got = compute()
    _require_form(want, got)
    if not shadows.rewrote:
        _require_values(want, got)
    return {name: None if value is None else shadows.of(value) for name, value in got.items()}


def _separately(compute: Compute, want: Tensors, fmt: Format, runs: int, seed: int) -> Tensors:
    made: dict[str, list[torch.Tensor]] = {name: [] for name, value in want.items() if value is not None}
    for k in range(runs):
        with _repeatable(seed), Rounding(fmt, seed * runs + k):
            got = _kept(compute())
        _require_form(want, got)
        for name, values in made.items():
            value = got[name]
            assert value is not None
            values.append(value)
    return {name: torch.stack(made[name]) if name in made else None for name in want}


@contextmanager
def _repeatable(seed: int) -> Iterator[None]:
    """The same random numbers in every run, and none of the attention kernels that cannot be taken apart."""
    fast = torch.backends.mha.get_fastpath_enabled()
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(seed)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


def _kept(results: Results) -> Tensors:
    """Copies, which later runs cannot write to."""
    for name, value in results.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise WrongUse(f"the reference returns {name} as {type(value).__name__}: expected a tensor or None")
    return {name: None if value is None else value.detach().clone() for name, value in results.items()}


def _require_form(want: Tensors, got: Results) -> None:
    for name in sorted(want.keys() | got.keys()):
        first, second = _form(want, name), _form(got, name)
        if first != second:
            raise WrongUse(f"the reference is not the same twice: {name} is {first} and then {second}")


def _form(run: Results, name: str) -> str:
    if name not in run:
        return "missing"
    value = run[name]
    return "None" if value is None else f"{value.dtype} {tuple(value.shape)}"


def _require_values(want: Tensors, got: Results) -> None:
    for name, first in want.items():
        second = got[name]
        if first is None or second is None or not first.numel():
            continue
        same = (first == second) | (first != first) & (second != second)
        off = torch.where(same, 0.0, (first.to(torch.float64) - second.detach().to(torch.float64)).abs())
        if not float(off.max()) <= _SAME * float(first.to(torch.float64).abs().nan_to_num(0.0, 0.0, 0.0).max()):
            raise WrongUse(
                f"the reference is not the same twice: {name} differs by up to {float(off.max()):.3g}. It must make "
                "its tensors anew, leave nothing changed behind, and draw no random numbers but torch's on the CPU"
            )
