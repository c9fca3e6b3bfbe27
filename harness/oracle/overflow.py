"""Where a result may overflow, whatever the order of its sums: there the format decides nothing for the judge."""

from __future__ import annotations

from typing import Any

import torch

from harness.oracle.dataflow import tensors_in
from harness.oracle.disturbing import Disturbing, Operation
from harness.oracle.noise import overflows_above
from reference.dtypes import Format


class LooksAtNumbers(Exception):
    """The computation looks at a number that may have overflowed: nobody knows where it would go."""


class Overflow(Disturbing):  # type: ignore[no-untyped-call]
    """Makes NaN of every element whose terms, in absolute value, add up to more than the format holds.

    In another order, or cut over ranks, such a sum may pass through an infinity: it may end as one, as NaN, or as the
    right number. The NaN reaches all that is computed from it. What is infinite because an argument is stays as it is.
    Raises LooksAtNumbers where the computation looks at such a number, or at what it compared.
    """

    def __init__(self, fmt: Format, seed: int) -> None:
        super().__init__(fmt, seed)
        self._found = False

    def leaving(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor's numbers go to Python. Raises LooksAtNumbers if some may have overflowed."""
        compared = tensor.dtype is torch.bool
        if self._found and (compared or (tensor.is_floating_point() and bool(tensor.isnan().any()))):
            raise LooksAtNumbers(name)

    def disturbed(self, operation: Operation) -> Any:
        if operation.rule.reads:
            for tensor in operation.inputs:
                self.leaving(operation.rule.name, tensor)
        if operation.exact:
            return operation.run()
        scales = operation.scales()
        arguments = operation.inputs + operation.named
        finite = all(bool(t.isfinite().all()) for t in arguments if t.is_floating_point())
        result = operation.run()
        results = [t for t in tensors_in(result) if t.is_floating_point()]
        found = [t.abs() for t in results] if scales is None else [s for s in scales if s.is_floating_point()]
        limit = overflows_above(operation.format)
        for tensor, scale in zip(results, found, strict=True):
            near = (scale > limit) & (scale.isfinite() if not finite else True)
            self._found = self._found or bool(near.any())
            tensor.masked_fill_(near, torch.nan)
        return result
