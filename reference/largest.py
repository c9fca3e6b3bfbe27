"""How large the numbers are that a backward pass meets, whatever the order of its sums."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reference.precision import current

#: Whose results are sums of terms that may cancel: in another order, or over a part of the terms, they may be as large
#: as the sum of magnitudes.
_SUMS = ("mm", "bmm", "addmm", "baddbmm", "sum", "index_add", "index_put", "mean")


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is open, sees every result that autograd computes in a backward.

    ``backward``: the largest magnitude, of sums that of the sum of magnitudes. ``stored``: the largest of what the
    reference says is stored in a format of its own on the way, as the gradient of the logits. What is not a number, and
    infinities, count as infinite.

    units: where the first dimension of a sum has so many units, or a multiple of them, those of a group of so many that
    stand one after another are added up too: the micro-batches of a rank. ``looked_up``, ``multiplied``: the largest of
    lookups and of matrix products alone, which are added where a table is both. apart: how many such groups are added
    that are not seen together.
    """

    def __init__(self, units: int = 1, group: int = 1, apart: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.backward = self.stored = self.looked_up = self.multiplied = 0.0
        self._units, self._group, self._apart = units, group, apart

    def reached(self, tied: bool) -> float:
        """The largest that there may be on the way, and in the sum of both uses of a ``tied`` table."""
        return self._apart * max(self.backward, self.looked_up + self.multiplied if tied else 0.0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kw = kwargs or {}
        if torch._C._current_autograd_node() is None:
            return func(*args, **kw)
        name = str(func.overloadpacket).rpartition(".")[2].rstrip("_")
        if name in _SUMS:
            self._see_sum(name, func(*[_absolute(one) for one in args], **kw))
        result = func(*args, **kw)
        if "empty" in name:
            return result  # nothing is in it yet but what memory had
        size = _magnitude(result)
        self.backward = max(self.backward, size)
        block = current()
        if block is not None and block.in_backward and block.stores:
            self.stored = max(self.stored, size)
        return result

    def _see_sum(self, name: str, magnitudes: Any) -> None:
        if self._group > 1 and magnitudes.dim() and magnitudes.shape[0] % self._units == 0:
            rows = magnitudes.shape[0] // self._units
            magnitudes = magnitudes.reshape(-1, self._group, rows, *magnitudes.shape[1:]).sum(1)
        size = _magnitude(magnitudes)
        self.backward = max(self.backward, size)
        if name.startswith("index"):
            self.looked_up = max(self.looked_up, size)
        elif "mm" in name:
            self.multiplied = max(self.multiplied, size)


def _absolute(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.abs() if value.is_floating_point() else value
    return [_absolute(one) for one in value] if isinstance(value, list | tuple) else value


def _magnitude(result: Any) -> float:
    if not isinstance(result, torch.Tensor) or not result.is_floating_point() or not result.numel():
        return 0.0
    largest = float(result.detach().abs().max())
    return largest if largest == largest else float("inf")
