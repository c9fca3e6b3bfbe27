"""How large the error of one call is, where that depends on its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from harness.oracle.tables import Args, Kind, Kwargs
from reference.dtypes import Format


class Size(NamedTuple):
    """What errors are relative to, and how many unit roundoffs: each element's own, and one that all have in common.

    The common one is that of a number that is rounded once and then met by every element; see `common_roundoff`.
    """

    kind: Kind
    own: float = 1.0
    common: float = 0.0


EXACT = Size(Kind.MOVEMENT, 0.0)

#: Says the size of the error of a call, for arithmetic in a format.
Choice = Callable[[Args, Kwargs, Format], Size]


def common_roundoff(fmt: Format) -> float:
    """Of numbers that are no tensors: kernels hold them in fp32 or better, whatever they compute with."""
    return min(fmt.unit_roundoff, 2.0**-24)


def is_power_of_two(number: float) -> bool:
    return math.frexp(number)[0] in (0.5, -0.5)


def fits(number: float, precision: int) -> bool:
    """Whether a number has at most ``precision`` significand bits, or is no finite number."""
    return not math.isfinite(number) or float(math.frexp(number)[0] * 2.0**precision).is_integer()


def scaled(number: float) -> tuple[float, float]:
    """The roundings of a product with a number: each element's own, and the common one of the number."""
    return (0.0, 0.0) if is_power_of_two(number) else (1.0, 0.0 if fits(number, 24) else 1.0)


def growth(count: float, fmt: Format) -> float:
    """How much more than its last rounding a sum of so many terms errs, relative to the total; see `accumulated`."""
    return math.sqrt((count - 1) / 3) if fmt.precision >= 24 and count > 1 else 0.0


def in_turn(base: str) -> bool:
    """Whether terms are added to the result one by one, in its format whatever that is."""
    return base in _INDEX


def terms(base: str, args: Args, result: torch.Tensor) -> float:
    """How many terms one element of a sum or a contraction has, as far as the shapes tell; 1 where they do not."""
    if base in _LAST_MATRIX:
        return float(args[-1].size(-2) if args[-1].dim() > 1 else args[-1].size(0))
    if base in ("sum", "mean", "nansum", "trace"):
        return float(args[0].numel() / max(result.numel(), 1))
    if base == "cumsum":
        return float(args[0].size(args[1])) if args[0].dim() else 1.0
    if base == "convolution":
        return float(args[1].numel() / args[1].size(0))
    if base == "convolution_backward":
        grad, x, weight = args[:3]
        return float(weight.numel() / x.size(1) if result.shape == x.shape else grad.numel() / grad.size(1))
    if base in _INDEX:
        index = args[_INDEX[base]]
        if isinstance(index, (list, tuple)):
            several = [one for one in index if one is not None]
            if len(several) != 1 or several[0].dtype == torch.bool:
                return float(max((one.numel() for one in several), default=1))
            index = several[0]
        if not index.numel():
            return 1
        most = float((index - index.min()).flatten().bincount().max())
        # Along the dimension that is scattered an element cannot get more than its length.
        return min(most, float(index.size(args[1]))) if base.startswith("scatter") and index.dim() else most
    return 1


def shared(base: str, kind: Kind, inputs: Sequence[torch.Tensor], result: torch.Tensor) -> tuple[int, ...]:
    """The shape of the disturbance of a result: 1 along dimensions where all arguments repeat one value.

    What is computed from equal values is rounded equally. Repetition is seen where strides show it: a gradient that
    comes out of the backward of a mean is one value, expanded.
    """
    size = result.size()
    if base in _CONSTANTS:
        return (1,) * len(size)
    if kind is Kind.ELEMENTWISE and inputs:
        for tensor in inputs:
            if tensor.size() == size and 0 not in tensor.stride():
                return size
        varying = {
            d - tensor.dim()
            for tensor in inputs
            for d, (n, step) in enumerate(zip(tensor.size(), tensor.stride(), strict=True))
            if n > 1 and step
        }
        return tuple(n if d - len(size) in varying else 1 for d, n in enumerate(size))
    if base in ("mm", "bmm"):
        a, b = inputs
        rows, columns = 1 if a.stride(-2) == 0 else size[-2], 1 if b.stride(-1) == 0 else size[-1]
        return (*size[:-2], rows, columns)
    return size


_CONSTANTS = frozenset(["full", "fill", "scalar_tensor", "full_like", "new_full"])
#: Where the index is that says which terms belong together.
_INDEX = {
    "embedding_dense_backward": 1,
    "index_add": 2,
    "scatter_add": 2,
    "scatter_reduce": 2,
    **dict.fromkeys(("put", "index_put", "_unsafe_index_put", "_index_put_impl"), 1),
}
_LAST_MATRIX = frozenset(["mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot"])


def _put(args: Args, kwargs: Kwargs, fmt: Format) -> Size:
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    return Size(Kind.REDUCTION) if accumulate else EXACT


def _scatter(args: Args, kwargs: Kwargs, fmt: Format) -> Size:
    how = args[4] if len(args) > 4 else kwargs.get("reduce")
    if how in (None, "amax", "amin"):
        return EXACT
    return Size(Kind.REDUCTION if how in ("add", "sum", "mean") else Kind.ELEMENTWISE)


def _multiplied(args: Args, kwargs: Kwargs, fmt: Format) -> Size:
    factor = args[1]
    return Size(Kind.ELEMENTWISE, *scaled(factor)) if isinstance(factor, (int, float)) else Size(Kind.ELEMENTWISE)


def _divided(args: Args, kwargs: Kwargs, fmt: Format) -> Size:
    """By a number also as the product with its inverse. A whole part is exact, if it is right at all."""
    if kwargs.get("rounding_mode") is not None:
        return EXACT
    divisor = args[1]
    if not isinstance(divisor, (int, float)):
        return Size(Kind.ELEMENTWISE)
    return Size(Kind.ELEMENTWISE, 0.0) if is_power_of_two(divisor) else Size(Kind.ELEMENTWISE, 1.0, 1.0)


def _mean(args: Args, kwargs: Kwargs, fmt: Format) -> Size:
    x, dims = args[0], args[1] if len(args) > 1 and args[1] else range(args[0].dim())
    count = math.prod(x.size(d) for d in dims) if x.dim() else 1
    return Size(Kind.REDUCTION, 1.0, 0.0 if is_power_of_two(count) else 1.0)


def _norm(args: Args, kwargs: Kwargs, fmt: Format) -> Size:
    """The sum of powers rounds as other sums do; the root halves its relative error, or takes a p-th of it."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    if isinstance(order, (int, float)) and math.isinf(order):
        return EXACT
    x, dims = args[0], args[2] if len(args) > 2 else kwargs.get("dim")
    dims = range(x.dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    count = math.prod(x.size(d) for d in dims) if x.dim() else 1
    return Size(Kind.ELEMENTWISE, 1.0 + growth(count, fmt))


def _product(args: Args, kwargs: Kwargs, fmt: Format) -> Size:
    """As many roundings as factors, which add up like a random walk."""
    x, dim = args[0], args[1] if len(args) > 1 else None
    return Size(Kind.ELEMENTWISE, math.sqrt(x.size(dim) if isinstance(dim, int) and x.dim() else max(x.numel(), 1)))


def _constant(args: Args, kwargs: Kwargs, fmt: Format) -> Size:
    """A tensor filled with a number is rounded to the format once."""
    number = args[-1]
    exact = not isinstance(number, float) or fits(number, fmt.precision)
    return EXACT if exact else Size(Kind.ELEMENTWISE)


def constants(args: Args, kwargs: Kwargs, fmt: Format) -> Size:
    """What copies and chooses is exact, but for numbers that the format does not hold: the bound of a clamp, a fill.

    They are rounded once, for all elements that get them; the others are taken to err with them.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, float) and not fits(value, fmt.precision):
            return Size(Kind.ELEMENTWISE, 0.0, fmt.unit_roundoff / common_roundoff(fmt))
    return EXACT


#: By the name of the operation without namespace, overload and the underscore of the in-place form.
CHOICES: Mapping[str, Choice] = {
    "mul": _multiplied,
    "div": _divided,
    "true_divide": _divided,
    "mean": _mean,
    "linalg_vector_norm": _norm,
    "norm": _norm,
    "prod": _product,
    "cumprod": _product,
    **dict.fromkeys(_CONSTANTS, _constant),
    **dict.fromkeys(("put", "index_put", "_unsafe_index_put", "_index_put_impl"), _put),
    **dict.fromkeys(("scatter", "scatter_reduce", "index_reduce"), _scatter),
}
