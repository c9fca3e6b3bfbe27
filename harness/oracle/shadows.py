"""Many disturbed runs of one computation for little more than one.

The computation runs once, undisturbed. Beside each storage that rounding reaches lies a *shadow*: what K disturbed
runs would hold there. Tensors that share a storage share its shadow, so views cost nothing, and an in-place operation
on a view reaches its base. An operation is run on the shadows of its arguments, on all K at once where its meaning
allows, and its results are disturbed there. Disturbances are relative to the results of one run, from which the other
runs' differ in the second order of the unit roundoff only.

What looks at numbers on its way, or has results whose shape depends on numbers, cannot be run so: `NeedsSeparateRuns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from harness.oracle.dataflow import Dataflow, NumbersLeave, require_dense, storage_key, tensors_in
from harness.oracle.disturbing import Disturbance, Disturbing, Operation
from harness.oracle.noise import Rounder, overflows_above, unit_of
from harness.oracle.together import together
from reference.dtypes import Format

#: Bytes of shadows after which those of dead storages are let go.
_SWEEP = 1 << 28


class NeedsSeparateRuns(Exception):
    """The computation looks at numbers on its way, so that each disturbed run must go its own."""


class Shadows(Disturbing):  # type: ignore[no-untyped-call]
    """Runs a computation with ``runs`` disturbed copies beside it; `of` gives them, also afterwards.

    Raises NeedsSeparateRuns, possibly out of ``backward()``.
    """

    def __init__(self, fmt: Format, seed: int, runs: int, flow: Dataflow | None = None) -> None:
        super().__init__(fmt, seed, flow)
        self.runs = runs
        # The largest of what operations disturb, and what it is where the terms add up to the format's largest number.
        self._peaks: list[tuple[torch.Tensor, float]] = []
        # By the address of the storage. The storage is held weakly, so that its address is not used again.
        self._flat: dict[int, torch.Tensor] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        self._bytes = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The disturbed copies, [K, *shape]: a view that must not be written to. None if the tensor is exact."""
        flat = self._flat.get(storage_key(tensor)) if tensor.numel() else None
        return None if flat is None else self._copies(flat, tensor, tensor.dim())

    def keep(self, tensor: torch.Tensor, copies: torch.Tensor) -> None:
        """Makes ``copies``, [K, *shape], the disturbed copies of a tensor that was made outside of this mode."""
        self._store(tensor, copies)

    def leaving(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor's numbers go to Python: no matter, as long as they are the same in all runs."""
        if storage_key(tensor) in self._flat:
            raise NeedsSeparateRuns(f"{name} hands numbers to Python")
        if self.flow is not None:
            self.flow.leave([tensor])

    def forget(self) -> None:
        """Of what was computed so far only the copies are kept, of tensors that are still there: for a computation that
        goes on for long, piece by piece. No graph of it may go backward any more."""
        self._peaks.clear()
        self._formats.clear()
        self._sweep()

    def near_overflow(self) -> bool:
        """Whether the terms of any operation may add up to more than its format holds. To be asked afterwards."""
        return any(not float(peak) <= limit for peak, limit in self._peaks)

    def disturbed(self, operation: Operation) -> Any:
        rule, flat = operation.rule, self._flat
        inputs = operation.inputs + operation.named
        shadowed = False
        if not rule.valueless:
            for tensor in inputs:
                if storage_key(tensor) in flat:
                    shadowed = True
                    break
        if operation.exact and (rule.view or not shadowed):
            return operation.run()
        if shadowed and rule.reads:
            raise NeedsSeparateRuns(f"{rule.name} looks at numbers")
        if rule.fused is not None:
            return self._fused(operation, inputs)
        scales = operation.scales()
        in_place = tensors_in([operation.args[w] for w in rule.writes if isinstance(w, int)])
        for tensor in in_place if shadowed else ():
            self._ensure(tensor)
        result = operation.run()
        results = tensors_in(result)
        if shadowed and rule.random:
            self._draw_once(operation, inputs, in_place)
        elif shadowed:
            self._follow(operation, results, bool(in_place))
        if not operation.exact:
            for tensor, disturbance in zip(results, operation.disturbances(results, scales), strict=True):
                if disturbance is not None:
                    self._watch(tensor, disturbance.own, operation)
                    self._disturb(tensor, disturbance, operation.format)
        return result

    def _watch(self, result: torch.Tensor, size: torch.Tensor | None, operation: Operation) -> None:
        """Keeps the largest magnitude of an operation's terms, taken from the size of its disturbance where it has one:
        infinities, which come from the arguments, do not count there."""
        unit = operation.size.own * unit_of(operation.format, result.dtype)
        if size is None or not unit:
            size, unit = result.abs().nan_to_num_(0.0, 0.0, 0.0), 1.0
        # Float64 has no room for what would show that it overflows itself.
        limit = -1.0 if operation.format.precision >= 53 else unit * overflows_above(operation.format)
        self._peaks.append((size.amax(), limit))

    def _fused(self, operation: Operation, inputs: Sequence[torch.Tensor]) -> Any:
        """A fused operation by itself, and with its inner roundings on the copies of its arguments."""
        assert operation.rule.fused is not None
        result = operation.run()
        rank = max(1, *(t.dim() for t in inputs))
        args = [self._lift(a, rank, expand=True) for a in operation.args]
        made = operation.rule.fused(Rounder(self.noise, operation.format, lead=1), *args, **operation.kwargs)
        for tensor, copies in zip(tensors_in(result), tensors_in(made), strict=True):
            if tensor.numel():
                self._watch(tensor, None, operation)
                self._store(tensor, copies.reshape(self.runs, *tensor.shape))
        return result

    def _follow(self, operation: Operation, results: Sequence[torch.Tensor], in_place: bool) -> None:
        """Runs an elementary operation on the copies of its arguments."""
        out_form = any(isinstance(w, str) for w in operation.rule.writes)
        how = together(operation) if len(results) == 1 and not out_form else None
        if how is not None:
            made = how(operation, self._lift, results[0])
            if made is not None:
                if not in_place:
                    self._store(results[0], made)
                return
        runs = [self._run_one(operation, k, results) for k in range(self.runs)]
        if in_place:
            return
        if any(a.shape != b.shape for run in runs for a, b in zip(run, results, strict=True)):
            raise NeedsSeparateRuns(f"{operation.rule.name} has results whose shape depends on numbers")
        for tensor, copies in zip(results, zip(*runs, strict=True), strict=True):
            self._store(tensor, torch.stack(copies))

    def _run_one(self, operation: Operation, k: int, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results for copy k; an in-place form writes to the copy, an out form to new tensors."""
        kwargs = {name: self._pick(value, k) for name, value in operation.kwargs.items()}
        outs = [name for name in operation.rule.writes if isinstance(name, str)]
        for name, plain in zip(outs, results, strict=False):
            kwargs[name] = torch.empty_like(plain)
        return tensors_in(operation.func(*[self._pick(a, k) for a in operation.args], **kwargs))

    def _draw_once(
        self, operation: Operation, inputs: Sequence[torch.Tensor], in_place: Sequence[torch.Tensor]
    ) -> None:
        """Numbers drawn are the same in every run; but what they are drawn from must be, too."""
        if len(inputs) > len(in_place):
            raise NeedsSeparateRuns(f"{operation.rule.name} draws from numbers")
        for tensor in in_place:
            self._copies(self._flat[storage_key(tensor)], tensor, tensor.dim()).copy_(tensor)

    def _disturb(self, tensor: torch.Tensor, disturbance: Disturbance, fmt: Format) -> None:
        xi = self.noise.draw((self.runs, *disturbance.shape), tensor.dtype)
        flat = self._flat.get(storage_key(tensor))
        if flat is None:
            self._store(tensor, torch.addcmul(tensor, xi, disturbance.own))
        else:
            self._copies(flat, tensor, tensor.dim()).addcmul_(xi, disturbance.own)
        if disturbance.common:
            copies = self._copies(self._flat[storage_key(tensor)], tensor, tensor.dim())
            copies.mul_(self.noise.factor((self.runs, *(1,) * tensor.dim()), disturbance.common, fmt))

    def _copies(self, flat: torch.Tensor, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """[K, 1, ..., *shape] with ``rank`` dimensions after the first."""
        if flat.dtype != tensor.dtype:
            raise NeedsSeparateRuns(f"one storage is looked at as {flat.dtype} and as {tensor.dtype}")
        new, size, stride = rank - tensor.dim(), tensor.size(), tensor.stride()
        if new > 0:
            size, stride = (*(1,) * new, *size), (*(0,) * new, *stride)  # type: ignore[assignment]
        offset = flat.storage_offset() + tensor.storage_offset()
        return flat.as_strided((self.runs, *size), (flat.size(1), *stride), offset)

    def _lift(self, value: Any, rank: int, expand: bool = False) -> Any:
        """The copies of an argument, with ``rank`` dimensions after the first; exact ones stay, or are expanded."""
        if not isinstance(value, torch.Tensor):
            return value
        flat = self._flat.get(storage_key(value))
        if flat is not None:
            return self._copies(flat, value, rank)
        if not expand:
            return value
        size, stride, new = value.size(), value.stride(), rank - value.dim()
        return value.as_strided((self.runs, *(1,) * new, *size), (0, *(0,) * new, *stride), value.storage_offset())

    def _pick(self, value: Any, k: int) -> Any:
        """An argument of run k."""
        if isinstance(value, torch.Tensor):
            flat = self._flat.get(storage_key(value))
            return value if flat is None else self._copies(flat, value, value.dim())[k]
        if isinstance(value, (list, tuple)):
            return [self._pick(member, k) for member in value]
        return value

    def _ensure(self, tensor: torch.Tensor) -> None:
        """Gives the storage of a tensor a shadow, if it has none: exact so far."""
        if storage_key(tensor) not in self._flat:
            whole = tensor.as_strided((_length(tensor),), (1,), 0)
            self._keep(tensor, whole.expand(self.runs, -1).clone())

    def _store(self, tensor: torch.Tensor, copies: torch.Tensor) -> None:
        """Makes ``copies``, [K, *shape], the shadow of a result, or the part of it that the result covers."""
        if copies.dtype != tensor.dtype:
            copies = copies.to(tensor.dtype)
        length = _length(tensor)
        if tensor.numel() == length:
            if copies.stride() == (length, *tensor.stride()):
                self._keep(tensor, copies.as_strided((self.runs, length), (length, 1)))
                return
            self._keep(tensor, torch.empty((self.runs, length), dtype=tensor.dtype))
        self._ensure(tensor)
        self._copies(self._flat[storage_key(tensor)], tensor, tensor.dim()).copy_(copies)

    def _keep(self, tensor: torch.Tensor, flat: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._flat[key] = flat
        if key not in self._storages:
            self._storages[key] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._bytes += flat.numel() * flat.element_size()
        if self._bytes > _SWEEP:
            self._sweep()

    def _sweep(self) -> None:
        self._bytes = 0
        for key in [k for k, ref in self._storages.items() if ref.expired()]:  # type: ignore[no-untyped-call]
            del self._flat[key], self._storages[key]


class NumbersStayInside(NumbersLeave):
    """Raises NeedsSeparateRuns where disturbed numbers leave torch without an operation that a dispatch mode sees."""

    def __init__(self, shadows: Shadows) -> None:
        super().__init__(shadows.leaving)


def _length(tensor: torch.Tensor) -> int:
    require_dense(tensor)
    return int(tensor.untyped_storage().nbytes() // tensor.element_size())
