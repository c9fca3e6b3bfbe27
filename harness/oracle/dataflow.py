"""Which inputs of a computation reach its results, by the operations between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.errors import WrongUse
from harness.oracle.operations import Rule, rule_of


def require_dense(tensor: torch.Tensor) -> None:
    """Raises WrongUse for a tensor without a storage of its values."""
    if tensor.layout is not torch.strided:
        raise WrongUse(
            f"the reference works on a tensor of layout {tensor.layout}: expected dense ones, let it call to_dense()"
        )


def storage_key(tensor: torch.Tensor) -> int:
    """The same for all tensors that share memory; used again by others once nobody refers to it, weakly or not."""
    require_dense(tensor)
    key: int = tensor.untyped_storage()._cdata
    return key


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results, those inside lists and tuples too, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, (list, tuple)):
        for member in value:
            if isinstance(member, torch.Tensor):
                found.append(member)
            elif isinstance(member, (list, tuple)):
                found += tensors_in(member)
    return found


def written(rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation writes to."""
    return [kwargs[w] if isinstance(w, str) else args[w] for w in rule.writes if not isinstance(w, str) or w in kwargs]


class Dataflow:
    """Follows the named tensors through operations, storage by storage.

    An input counts as reaching a result if an operation read it, or something made from it, on the way; what it
    computed does not matter, so zeros hide nothing. Where numbers leave torch for Python, they may reach anything.
    """

    def __init__(self, given: Mapping[str, torch.Tensor]) -> None:
        self._names = list(given)
        self._bits: dict[int, int] = {}
        self._held: list[StorageWeakRef | torch.Tensor] = list(given.values())
        self._in_python = 0
        for bit, tensor in enumerate(given.values()):
            self._bits[storage_key(tensor)] = self._bits.get(storage_key(tensor), 0) | 1 << bit

    def follow(self, inputs: Iterable[torch.Tensor], results: Iterable[torch.Tensor]) -> None:
        """What the inputs carry, the results carry too."""
        bits = self._bits
        carried = 0
        for tensor in inputs:
            carried |= bits.get(storage_key(tensor), 0)
        if not carried:
            return
        for tensor in results:
            key = storage_key(tensor)
            if key not in bits:
                # Held weakly, so that its address is not used again.
                self._held.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
            bits[key] = bits.get(key, 0) | carried

    def leave(self, inputs: Iterable[torch.Tensor]) -> None:
        """Numbers of these went to Python."""
        for tensor in inputs:
            self._in_python |= self._bits.get(storage_key(tensor), 0)

    def left(self, name: str, tensor: torch.Tensor) -> None:
        """As `leave`, for `NumbersLeave`."""
        self.leave([tensor])

    def unused(self, results: Iterable[torch.Tensor | None]) -> Sequence[str]:
        """The names of the inputs that reach none of the results, in order."""
        reached = self._in_python
        for tensor in results:
            if tensor is not None:
                reached |= self._bits.get(storage_key(tensor), 0)
        return [name for bit, name in enumerate(self._names) if not reached >> bit & 1]


class Following(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a Dataflow see every operation, and changes nothing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, flow: Dataflow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flow = flow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kw, rule = kwargs or {}, rule_of(func)
        result = func(*args, **kw)
        if not rule.view and not rule.valueless:
            inputs = tensors_in([*args, *kw.values()])
            self._flow.follow(inputs, tensors_in([result, *written(rule, args, kw)]))
            if rule.reads:
                self._flow.leave(inputs)
        return result


class NumbersLeave(TorchFunctionMode):
    """Calls ``told(name, tensor)`` where numbers leave torch without an operation that a dispatch mode sees."""

    def __init__(self, told: Callable[[str, torch.Tensor], None]) -> None:
        self._told = told

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LEAVING:
            self._told(func.__name__, args[0])
        elif func in _FACTORIES:
            for tensor in _nested(args[1 if func is torch.Tensor.new_tensor else 0] if args else None):
                self._told(func.__name__, tensor)
        return func(*args, **(kwargs or {}))


def _nested(value: Any) -> Iterator[torch.Tensor]:
    """The tensors inside of lists and tuples: their numbers are read one by one."""
    for member in value if isinstance(value, (list, tuple)) else ():
        if isinstance(member, torch.Tensor):
            yield member
        else:
            yield from _nested(member)


#: Make a tensor of numbers, also of those of other tensors.
_FACTORIES = frozenset([torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor])

_LEAVING = frozenset(
    getattr(torch.Tensor, name)
    for name in ("numpy", "tolist", "__array__", "data_ptr", "storage", "untyped_storage", "__dlpack__")
    if hasattr(torch.Tensor, name)
)
