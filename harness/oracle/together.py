"""Operations on all disturbed copies at once: a leading dimension K more, where the meaning allows.

Each function gets the operation and ``lift``, which turns an argument into its copies, [K, ..., *shape], with ones
before its own dimensions so that there are ``rank`` of them, or leaves it as it is where it has no copies. It returns
the results, [K, *shape], or None where the operation must run on one copy after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from harness.oracle.disturbing import Operation

#: Called with an argument, a rank, and whether an exact one is to be expanded to K copies.
Lift = Callable[..., Any]
Together = Callable[[Operation, Lift, torch.Tensor], torch.Tensor | None]


def _pointwise(operation: Operation, lift: Lift, plain: torch.Tensor) -> torch.Tensor | None:
    rank = plain.dim()
    if operation.kwargs.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
        return None
    made: torch.Tensor = operation.func(*[lift(a, rank) for a in operation.args], **operation.kwargs)
    return made


def _mm(operation: Operation, lift: Lift, plain: torch.Tensor) -> torch.Tensor | None:
    a, b = operation.args
    return torch.matmul(lift(a, a.dim()), lift(b, b.dim()))


def _addmm(operation: Operation, lift: Lift, plain: torch.Tensor) -> torch.Tensor | None:
    if operation.kwargs:
        return None
    c, a, b = operation.args
    made: torch.Tensor = torch.matmul(lift(a, a.dim()), lift(b, b.dim())) + lift(c, plain.dim())
    return made


def _reduced(operation: Operation, lift: Lift, plain: torch.Tensor) -> torch.Tensor | None:
    x, *rest = operation.args
    if not x.dim():
        return None
    dims = rest[0] if rest and rest[0] is not None else []
    dims = [dims] if isinstance(dims, int) else list(dims)
    negative = [d if d < 0 else d - x.dim() for d in dims] or list(range(-x.dim(), 0))
    made: torch.Tensor = operation.func.overloadpacket(lift(x, x.dim()), negative, *rest[1:], **operation.kwargs)
    return made


def _joined(operation: Operation, lift: Lift, plain: torch.Tensor) -> torch.Tensor | None:
    tensors, *rest = operation.args
    if operation.kwargs or any(t.dim() != tensors[0].dim() for t in tensors):
        return None
    dim = rest[0] if rest else 0
    copies = [lift(t, t.dim(), True) for t in tensors]
    made: torch.Tensor = operation.func(copies, dim if dim < 0 else dim - plain.dim())
    return made


def together(operation: Operation) -> Together | None:
    """How to run the operation on all copies at once, or None where it is not known."""
    known = _TOGETHER.get(operation.rule.name)
    if known is None and operation.rule.pointwise:
        return _pointwise
    return known


_TOGETHER: Mapping[str, Together] = {
    "aten::mm": _mm,
    "aten::bmm": _mm,
    "aten::addmm": _addmm,
    "aten::baddbmm": _addmm,
    "aten::_to_copy": _pointwise,
    "aten::copy_": _pointwise,
    "aten::cat": _joined,
    "aten::stack": _joined,
    **{f"aten::{name}": _reduced for name in ("sum", "mean", "amax", "amin")},
}
