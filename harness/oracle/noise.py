"""How large a disturbance is, and the random numbers it is made of."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence

import torch

from harness.oracle.sizes import common_roundoff, is_power_of_two, scaled
from reference.dtypes import Format

#: Numbers drawn once and used in slices that start at random places: drawing anew costs more than the operations.
_STOCK = 1 << 20

#: Tensors of a lower precision inside the reference are rounded to it, whatever the format under test.
_OWN_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

#: Unit roundoffs by which the terms of a sum may be larger in the format than in the reference.
_MARGIN = 32


class Noise:
    """Numbers uniform in [-1, 1], decided by a seed."""

    def __init__(self, seed: int) -> None:
        self._where = random.Random(seed)

    def draw(self, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """A tensor of ``shape``; it may share memory with others and must not be written to."""
        count = math.prod(shape)
        if count > _STOCK // 2:
            generator = torch.Generator().manual_seed(self._where.getrandbits(62))
            return torch.empty(shape, dtype=torch.float64).uniform_(-1, 1, generator=generator).to(dtype)
        start = int(self._where.random() * (_STOCK - count))
        xi = _stock().narrow(0, start, count).view(shape)
        return xi if dtype is torch.float64 else xi.to(dtype)

    def factor(self, shape: Sequence[int], roundings: float, fmt: Format) -> torch.Tensor:
        """1 + up to ``roundings`` of the roundoff of a number that kernels hold in fp32 or better."""
        return self.draw(shape).mul(roundings * common_roundoff(fmt)).add_(1.0)


@functools.cache
def _stock() -> torch.Tensor:
    """[_STOCK], float64."""
    generator = torch.Generator().manual_seed(0x5EED)
    return torch.empty(_STOCK, dtype=torch.float64).uniform_(-1, 1, generator=generator)


def unit_of(fmt: Format, dtype: torch.dtype) -> float:
    """The u of the model, for a tensor of the reference; twice that of float64 itself, in which the reference errs as
    much as what it judges."""
    u = fmt.unit_roundoff if fmt.precision < 53 else 2 * fmt.unit_roundoff
    return min(u, _OWN_ROUNDOFF.get(dtype, 1.0))


def overflows_above(fmt: Format) -> float:
    """The magnitude from which on rounding and the order of a sum decide whether it overflows."""
    return fmt.largest / (1 + _MARGIN * fmt.unit_roundoff)


def amplitude(scale: torch.Tensor, fmt: Format, roundings: float = 1.0, underflows: bool = True) -> torch.Tensor:
    """The largest disturbance of each element: ``roundings * u * scale``, and zero where that is not finite.

    Where the result can underflow, half the smallest subnormal number is added (Higham, Accuracy and Stability of
    Numerical Algorithms, 2nd ed., section 2.2: the model with underflow), but no more than the scale itself, so that
    zero stays zero. scale: not negative; it may be overwritten.
    """
    u = roundings * unit_of(fmt, scale.dtype)
    if not underflows:
        size = scale.mul_(u)
    elif u:
        size = scale.clamp(max=fmt.smallest / 2).add_(scale, alpha=u)
    else:
        size = scale.clamp(max=fmt.smallest / 2).mul_(scale < fmt.smallest_normal)
    return size.nan_to_num_(0.0, 0.0, 0.0)


def accumulated(
    scale: torch.Tensor, total: torch.Tensor, terms: float, fmt: Format, in_turn: bool = False
) -> torch.Tensor:
    """What the error of a sum of ``terms`` terms is relative to: ``scale``, the sum of their magnitudes, or more.

    A sum kept in the format itself rounds every partial sum. In a random order those grow linearly to the total, so the
    squares of their errors add up to about terms / 3 times the square of the total's: it grows with the square root
    of the number of terms (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM Journal on
    Scientific Computing 41, 2019). fp16 and bf16 are summed in fp32 by nearly all that computes with them, which does
    not show; but what is added to a tensor term by term, ``in_turn``, is rounded to its format each time. scale:
    overwritten.
    """
    if terms <= 1 or (fmt.precision < 24 and not in_turn):
        return scale
    return scale.add_(total.abs(), alpha=math.sqrt((terms - 1) / 3))


class Earlier:
    """Hands each run of a computation the values of the run before, by their number; `begin` starts a run."""

    def __init__(self) -> None:
        self._before: list[torch.Tensor] = []
        self._now: list[torch.Tensor] = []

    def begin(self) -> None:
        self._before, self._now = self._now, []

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """The value of the run before; x itself in the first run, and where the run before went another way."""
        number = len(self._now)
        self._now.append(x)
        before = self._before[number] if number < len(self._before) else x
        return before if before.shape == x.shape else x


class Rounder:
    """Disturbs results inside a fused operation: ``r(a * b)`` is the product, rounded.

    ``lead`` is 1 where tensors have copies stacked before the dimensions of the operation, and 0 where not. The size of
    a disturbance is taken from the first copy: the others differ in second order. earlier: the same values in another
    run, where there is but one copy.
    """

    def __init__(self, noise: Noise, fmt: Format, lead: int, earlier: Earlier | None = None) -> None:
        self.noise, self.format, self.lead, self._earlier = noise, fmt, lead, earlier

    def __call__(self, x: torch.Tensor, roundings: float = 1.0, underflows: bool = True) -> torch.Tensor:
        """x, a new tensor, disturbed in place."""
        return self._add(x, self._one(x).abs(), roundings, underflows)

    def sum(self, x: torch.Tensor, dims: list[int], keepdim: bool = False) -> torch.Tensor:
        """The sum over dimensions counted from the last, -1."""
        return self._total(x.sum(dims, keepdim), self._one(x).abs().sum(dims, keepdim), x, False)

    def mean(self, x: torch.Tensor, dims: list[int], keepdim: bool = False) -> torch.Tensor:
        mean = self._total(x.mean(dims, keepdim), self._one(x).abs().mean(dims, keepdim), x, True)
        return self._scale(mean, 0.0 if is_power_of_two(math.prod(x.size(d) for d in dims)) else 1.0)

    def times(self, x: torch.Tensor, number: float) -> torch.Tensor:
        """The product with a number, which is rounded too, once for all elements."""
        own, common = scaled(number)
        return self._scale(self(x * number, own), common)

    def together(self, x: torch.Tensor, roundings: torch.Tensor) -> torch.Tensor:
        """x, disturbed in place by up to ``roundings``, broadcast, of the roundoff of a number in fp32 or better."""
        size = self._one(roundings).abs().mul_(common_roundoff(self.format)).nan_to_num_(0.0, 0.0, 0.0)
        return x.mul_(self.noise.draw(roundings.shape).mul(size).add_(1.0))

    def another(self, x: torch.Tensor) -> torch.Tensor:
        """x with the errors of another run; without another one, x."""
        if self.lead:
            return x.roll(1, 0)
        return x if self._earlier is None else self._earlier.exchange(x)

    def rank(self, x: torch.Tensor) -> int:
        """The dimensions of the operation's argument."""
        return x.dim() - self.lead

    def _total(self, total: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, underflows: bool) -> torch.Tensor:
        terms = x.numel() / max(total.numel(), 1)
        return self._add(total, accumulated(scale, self._one(total), terms, self.format), 1.0, underflows)

    def _scale(self, x: torch.Tensor, roundings: float) -> torch.Tensor:
        lead = x.shape[: self.lead] + (1,) * (x.dim() - self.lead)
        return x.mul_(self.noise.factor(lead, roundings, self.format)) if roundings else x

    def _one(self, x: torch.Tensor) -> torch.Tensor:
        return x[0] if self.lead else x

    def _add(self, x: torch.Tensor, scale: torch.Tensor, roundings: float, underflows: bool) -> torch.Tensor:
        size = amplitude(scale, self.format, roundings, underflows)
        return x.addcmul_(self.noise.draw(x.shape, x.dtype), size)
