"""Whether a reference can be believed: what is wrong with it is never held against the candidate."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from harness.errors import WrongUse

Results = Mapping[str, torch.Tensor | None]
Tensors = dict[str, torch.Tensor | None]

#: How far two runs of one computation in float64 may differ, relative to the largest value: matrix products may depend
#: on where their arguments lie in memory.
_SAME = 2.0**-20


class UnsoundReference(WrongUse):
    """The reference does what no reference may do; the message says what."""


def kept(results: Results) -> Tensors:
    """Copies, which later runs cannot write to, and which share no memory with what the reference keeps."""
    if not isinstance(results, Mapping):
        raise UnsoundReference(f"the reference returns {type(results).__name__}: expected tensors by name, as a dict")
    for name, value in results.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise UnsoundReference(f"the reference returns {name} as {type(value).__name__}: expected a tensor or None")
    return {name: None if value is None else value.detach().clone() for name, value in results.items()}


@contextmanager
def unchanged(given: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Raises UnsoundReference if what runs inside changes one of the tensors."""
    before = {name: tensor.detach().clone() for name, tensor in given.items()}
    yield
    for name, tensor in given.items():
        if not _same_bits(before[name], tensor.detach()):
            raise UnsoundReference(
                f"the reference changes its input {name} in place, so that what it computes next, and what others "
                "are given, is not the case any more: let it work on copies"
            )


def require_numbers(given: Mapping[str, torch.Tensor], results: Results, may_be_nan: Collection[str]) -> None:
    """Raises UnsoundReference for NaN out of finite inputs: nothing could be compared with it."""
    if not given or not all(bool(tensor.isfinite().all()) for tensor in given.values()):
        return
    for name, value in results.items():
        if value is not None and name not in may_be_nan and bool(value.isnan().any()):
            count = int(value.isnan().sum())
            raise UnsoundReference(
                f"the reference returns NaN in {count} of {value.numel()} elements of {name}, and all its inputs are "
                "finite: nothing can be compared with that. Mend it, or say that this result may be NaN"
            )


def require_used(unused: Sequence[str], results: Results) -> None:
    """Raises UnsoundReference if no result comes from one of the inputs."""
    if unused:
        raise UnsoundReference(
            f"the reference ignores its input {', '.join(unused)}: nothing of it reaches any of "
            f"{', '.join(name for name, value in results.items() if value is not None) or 'no results'}, so "
            "whatever a candidate does with it would be right"
        )


def require_own_memory(name: str, want: NDArray[np.float64], got: Iterable[NDArray[np.float64] | None]) -> None:
    """Raises UnsoundReference if what a rank returned lies in the memory of what is expected of it."""
    if any(values is not None and np.may_share_memory(want, values) for values in got):
        raise UnsoundReference(
            f"the expected values of {name} share memory with what the candidate returned, so that they are compared "
            "with themselves: the reference must not hand out the tensors that a candidate works on"
        )


def require_form(want: Results, got: Results) -> None:
    """Raises UnsoundReference if two runs return different names, shapes or dtypes."""
    for name in sorted(want.keys() | got.keys()):
        first, second = _form(want, name), _form(got, name)
        if first != second:
            raise UnsoundReference(f"the reference is not the same twice: {name} is {first} and then {second}")


def _form(run: Results, name: str) -> str:
    if name not in run:
        return "missing"
    value = run[name]
    return "None" if value is None else f"{value.dtype} {tuple(value.shape)}"


def require_values(want: Results, got: Results, exact: bool = False) -> None:
    """Raises UnsoundReference if two runs return different values; exact: in any bit."""
    for name, first in want.items():
        second = got[name]
        if first is None or second is None or torch.equal(first, second):
            continue
        same = (first == second) | (first != first) & (second != second)
        off = torch.where(same, 0.0, (first.to(torch.float64) - second.detach().to(torch.float64)).abs())
        if not float(off.max()) <= (0.0 if exact else _SAME) * float(
            first.to(torch.float64).abs().nan_to_num(0.0, 0.0, 0.0).max()
        ):
            raise UnsoundReference(
                f"the reference is not the same twice: {name} differs by up to {float(off.max()):.3g}. It must make "
                "its tensors anew, leave nothing changed behind, and draw no random numbers but torch's on the CPU"
            )


def _same_bits(before: torch.Tensor, after: torch.Tensor) -> bool:
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    return torch.equal(before, after) or bool(((before == after) | (before != before) & (after != after)).all())
