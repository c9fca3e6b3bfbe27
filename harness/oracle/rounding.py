"""The rounding model: how far rounding alone can move what a reference computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.errors import WrongUse
from harness.oracle.disturbing import Disturbing, Operation, tensors_in
from harness.oracle.noise import Rounder
from harness.oracle.shadows import NeedsSeparateRuns, NumbersStayInside, Shadows
from reference.dtypes import Format

Compute = Callable[[], Mapping[str, torch.Tensor | None]]
Tensors = dict[str, torch.Tensor | None]


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


@dataclass(frozen=True, eq=False)
class Spread:
    """How far K disturbed runs lie from what the reference computes, for one tensor.

    ``want``: the undisturbed values, float64. ``residuals``: [K, *shape], disturbed - want; zero where either is not
    finite. ``deviation``: of the shape of ``want``, the largest |residual| of each element. ``floor``: the root mean
    square of ``deviation`` over the elements that are finite in all runs. ``slope_rms``: the root mean square over the
    runs of (residual . want) / (want . want), 0 where ``want`` is 0. ``ambiguous``: of the shape of ``want``, True
    where rounding decides whether the value is finite, or which infinity it is, or whether it is NaN.
    """

    want: torch.Tensor
    residuals: torch.Tensor
    deviation: torch.Tensor
    floor: float
    slope_rms: float
    ambiguous: torch.Tensor


def spread(compute: Compute, fmt: Format, *, runs: int = 8, seed: int = 0) -> dict[str, Spread | None]:
    """Runs ``compute`` undisturbed, and ``runs`` times with every operation disturbed as arithmetic in ``fmt`` would.

    compute: makes its tensors anew at each call, in float64, and returns results by name, gradients too; None stays
    None. It may call ``backward()``. What it draws from torch's random numbers on the CPU is decided by ``seed`` too.
    Raises UnknownOperation where an operation is used of which nobody said how it rounds, and WrongUse where the runs
    disagree about names, shapes or dtypes, or runs is not at least 1.
    """
    if runs < 1:
        raise WrongUse(f"runs {runs} must be at least 1")
    with _repeatable(seed):
        want = _detached(compute())
    copies = _disturbed(compute, want, fmt, runs, seed)
    return {name: None if value is None else _measure(value, copies[name], runs) for name, value in want.items()}


def _disturbed(compute: Compute, want: Tensors, fmt: Format, runs: int, seed: int) -> Tensors:
    """The disturbed values of each tensor, [K, *shape]; None for what no rounding reaches."""
    try:
        with _repeatable(seed), NumbersStayInside(), Shadows(fmt, seed, runs) as shadows:
            got = _alike(want, compute())
        return {name: None if value is None else shadows.of(value) for name, value in got.items()}
    except NeedsSeparateRuns:
        separate = []
        for k in range(runs):
            with _repeatable(seed), Rounding(fmt, seed * runs + k):
                separate.append(_alike(want, compute()))
        return {
            name: None if value is None else torch.stack([run[name] for run in separate])  # type: ignore[misc]
            for name, value in want.items()
        }


@contextmanager
def _repeatable(seed: int) -> Iterator[None]:
    """The same random numbers in every run, and none of the attention kernels that cannot be taken apart."""
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(seed)
        yield


def _detached(results: Mapping[str, torch.Tensor | None]) -> Tensors:
    return {name: None if value is None else value.detach() for name, value in results.items()}


def _alike(want: Tensors, results: Mapping[str, torch.Tensor | None]) -> Tensors:
    """The results of another run, if they have the form of the first."""
    got = _detached(results)
    for name in sorted(want.keys() | got.keys()):
        forms = [_form(run, name) for run in (want, got)]
        if forms[0] != forms[1]:
            raise WrongUse(f"the reference is not the same twice: {name} is {forms[0]} and then {forms[1]}")
    return got


def _form(run: Tensors, name: str) -> str:
    if name not in run:
        return "missing"
    value = run[name]
    return "None" if value is None else f"{value.dtype} {tuple(value.shape)}"


def _measure(want: torch.Tensor, copies: torch.Tensor | None, runs: int) -> Spread:
    """The statistics of K disturbed copies of one tensor, [K, *shape], or None if it is exact."""
    value = want.to(torch.float64)
    if copies is None:
        zeros = torch.zeros((runs, *want.shape), dtype=torch.float64)
        return Spread(value, zeros, zeros[0], 0.0, 0.0, torch.zeros(want.shape, dtype=torch.bool))
    copies = copies.to(torch.float64)
    residuals = copies - value
    finite = residuals.isfinite()
    same = (copies == value) | (copies.isnan() & value.isnan())
    ambiguous = ~(finite | same).all(0)
    judged = finite.all(0)
    residuals = torch.where(finite, residuals, 0.0)
    deviation = residuals.abs().amax(0)
    floor = _rms(deviation[judged])
    slope = _slope_rms(residuals, torch.where(judged, value, 0.0))
    return Spread(value, residuals, deviation, floor, slope, ambiguous)


def _rms(values: torch.Tensor) -> float:
    """Scaled by the largest value, so that no square leaves float64."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    return largest * float((values / largest).square().mean().sqrt()) if largest else 0.0


def _slope_rms(residuals: torch.Tensor, want: torch.Tensor) -> float:
    """Of residuals, [K, *shape], along want."""
    largest = float(want.abs().max()) if want.numel() else 0.0
    if not largest:
        return 0.0
    unit = (want / largest).flatten()
    return _rms((residuals.reshape(len(residuals), -1) / largest) @ unit / (unit @ unit))
