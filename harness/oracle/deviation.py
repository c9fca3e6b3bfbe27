"""How far disturbed runs lie from the undisturbed one: what is measured of each tensor. NaN-safe."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

#: Disturbed runs of one computation.
RUNS = 8


@dataclass(frozen=True, eq=False)
class Spread:
    """How far K disturbed runs lie from what the reference computes, for one tensor.

    ``want``: the undisturbed values, float64. ``residuals``: [K, *shape], disturbed - want; zero where either is not
    finite. ``deviation``: of the shape of ``want``, the largest |residual| of each element in eight runs; with more
    runs the mean of that, which scatters less. ``ambiguous``: of the shape
    of ``want``, True where rounding decides whether the value is finite, or which infinity it is, or whether it is NaN.
    """

    want: torch.Tensor
    residuals: torch.Tensor
    deviation: torch.Tensor
    ambiguous: torch.Tensor

    @property
    def floor(self) -> float:
        """The root mean square of ``deviation`` over the elements whose value is finite in all runs."""
        return _rms(self.deviation[self.want.isfinite() & ~self.ambiguous])

    @property
    def slope_rms(self) -> float:
        """The root mean square over the runs of (residual . want) / (want . want); 0 where ``want`` is 0."""
        want = torch.where(self.want.isfinite() & ~self.ambiguous, self.want, 0.0)
        return _slope_rms(self.residuals, want)


def measure(want: torch.Tensor, copies: torch.Tensor | None, runs: int) -> Spread:
    """The statistics of K disturbed copies of one tensor, [K, *shape], or None if it is exact."""
    value = want.to(torch.float64)
    nowhere = torch.zeros(want.shape, dtype=torch.bool)
    if copies is None:
        zeros = torch.zeros((runs, *want.shape), dtype=torch.float64)
        return Spread(value, zeros, zeros[0], nowhere)
    copies = copies.to(torch.float64)
    residuals = copies - value
    deviation = largest(residuals)
    if not value.numel() or math.isfinite(float(deviation.max())):
        return Spread(value, residuals, deviation, nowhere)
    finite = residuals.isfinite()
    same = (copies == value) | (copies.isnan() & value.isnan())
    residuals = torch.where(finite, residuals, 0.0)
    return Spread(value, residuals, largest(residuals), ~(finite | same).all(0))


def largest(residuals: torch.Tensor) -> torch.Tensor:
    """Of each element in eight runs, or the mean of that in more. residuals: [K, *shape]."""
    runs = len(residuals)
    if runs <= RUNS or runs % RUNS:
        return residuals.abs().amax(0)
    return residuals.abs().view(runs // RUNS, RUNS, *residuals.shape[1:]).amax(1).mean(0)


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
