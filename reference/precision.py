"""What a reference says about the precision of parts of a computation. It changes no value.

The reference computes in float64 throughout. Where the implementation under test does something in another format
than the rest (sums in fp32, a softmax in fp32, a result stored in bf16), the reference says so, and whoever estimates
rounding errors asks `current`:

    with computed_in("fp32"):
        y = x @ weight.T
    y = rounded_to("bf16")(y)

What autograd later computes for operations of such a block counts as computed in the same format. A block around the
call of ``backward()`` holds for the operations that are in no block of their own; one inside a hand-written backward
holds for what is inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from reference.dtypes import Format, format_of


@dataclass(frozen=True)
class Precision:
    """A block of the reference.

    ``since``: the first number that autograd may give to an operation of the block. ``in_backward``: whether the block
    stands inside a backward function. ``stores``: the block copies a result into a tensor of that format.
    """

    format: Format
    since: int
    in_backward: bool
    stores: bool = False


_current: ContextVar[Precision | None] = ContextVar("precision", default=None)


def current() -> Precision | None:
    """The innermost block that is open, or None where the precision of the case holds."""
    return _current.get()


def computed_in(name: str) -> Any:
    """A block whose operations are computed and stored in the format ``name``. Raises ValueError if it is unknown."""
    return _block(format_of(name), stores=False)


def rounded_to(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that says that its argument is stored in the format ``name``: of any shape, returned as a copy.

    The gradient goes through unchanged. Raises ValueError if the format is unknown.
    """
    fmt = format_of(name)

    def store(x: torch.Tensor) -> torch.Tensor:
        with _block(fmt, stores=True):
            return x.clone()

    return store


def gradient_rounded_to(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that says that its argument's gradient is stored in the format ``name``; the value goes through.

    That is what a cast from bf16 to fp32 does: exact forward, rounding backward. Raises ValueError if the format is
    unknown.
    """
    fmt = format_of(name)

    def mark(x: torch.Tensor) -> torch.Tensor:
        marked: torch.Tensor = _RoundedGradient.apply(x, fmt.name)  # type: ignore[no-untyped-call]
        return marked

    return mark


@contextmanager
def _block(fmt: Format, stores: bool) -> Iterator[None]:
    in_backward = torch._C._current_autograd_node() is not None
    since = torch._C._autograd._get_sequence_nr()
    token = _current.set(Precision(fmt, since, in_backward, stores))
    try:
        yield
    finally:
        _current.reset(token)


class _RoundedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return rounded_to(ctx.name)(grad), None
