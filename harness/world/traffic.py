"""Sees every collective that a rank begins, those of a backward pass and of PyTorch's own layers included."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

# How PyTorch's operators are called, and how the function is called that users know.
_PUBLIC_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced_": "all_reduce_coalesced",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather_coalesced",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "all_gather_into_tensor_out": "all_gather_into_tensor",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_out": "reduce_scatter_tensor",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "recv_any_source_": "recv",
    "monitored_barrier_": "barrier",
}
_GROUPS = ("process_group", "group_name")
# What a rank takes part with is what it gives, and where it gives nothing, what it gets.
_GIVES = ("input_tensors", "inputs", "input_list", "input_tensor", "input", "tensors", "tensor")
_GETS = ("output_tensors", "outputs", "output")
_PEERS = ("dst", "src", "root_rank")


@dataclass(frozen=True)
class Collective:
    """One collective of one rank. Its place among the rank's collectives is its place in ``Recorder.records()``.

    operation: as in torch.distributed, for example ``all_gather_into_tensor``. group: the global ranks, in the order
    of the group. dtype: for example ``float32``; None without a tensor. elements, bytes: of the tensors that this rank
    gives, or gets where it gives none (the receiving end of recv, broadcast and scatter). peer: the global rank of the
    other end or the root; None where there is none. tag: of a send or receive, what matches them beside their order.
    aside: a thread of the candidate's own began it, so that its place among those of other groups says nothing.
    How an operator reduces (sum, max) cannot be seen from here.
    """

    operation: str
    group: tuple[int, ...]
    dtype: str | None
    elements: int
    bytes: int
    peer: int | None = None
    tag: int = 0
    aside: bool = False

    def describe(self) -> str:
        """For example ``all_reduce on group [0, 1], float32, 12 elements``."""
        towards = f" (peer {self.peer})" if self.peer is not None else ""
        what = f", {self.dtype}, {self.elements} elements" if self.dtype else ""
        return f"{self.operation}{towards} on group {list(self.group)}{what}"


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which this thread's collectives are recorded just before they start, and nothing is changed; with
    `follow_threads`, those of threads too that are started later.

    on_collective: called with each record and its number, from 1. It may be entered more than once; nested recorders
    all see everything. Measured cost: 4 microseconds an operator, since every
    operator comes by, and 60 a collective.
    """

    supports_higher_order_operators = True  # PyTorch refuses them under a mode that does not say so

    def __init__(self, on_collective: Callable[[Collective, int], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_collective = on_collective
        self._lock = threading.Lock()
        self._records: list[Collective] = []

    def records(self) -> tuple[Collective, ...]:
        """What was recorded so far, in order."""
        return tuple(self._records)

    def clear(self) -> None:
        """Forgets the records."""
        self._records = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True makes PyTorch import its compiler, 1 to 2 s, only to keep it away from the few lines below.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # torch.compile inside a job compiles as it does elsewhere

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        watched = _watched.get(func)
        if watched is None:
            watched = _watched.setdefault(func, _is_collective(func))
        if not watched and any(_goes_first(t) for t in types):
            # DTensor communicates inside its own dispatch, where a mode that has already handled the operator is
            # blind: let it go first, what it calls comes by again.
            return NotImplemented
        if watched:
            self._begins(_record(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _begins(self, record: Collective) -> None:
        with self._lock:
            self._records.append(record)
            number = len(self._records)
        if self._on_collective is not None:
            self._on_collective(record, number)


class _Aside(Recorder):  # type: ignore[no-untyped-call]
    """Records what another thread begins into a recorder: PyTorch's modes are each thread's own."""

    def __init__(self, main: Recorder) -> None:
        super().__init__()
        self._main = main

    def _begins(self, record: Collective) -> None:
        self._main._begins(replace(record, aside=True))


def follow_threads(recorder: Recorder) -> None:
    """From now on every thread that this process starts is recorded as well, as long as it lives: frameworks reduce
    gradients in threads of their own. For a process that is ours."""
    start = threading.Thread.start

    def recorded(thread: threading.Thread) -> None:
        run = thread.run

        def inside() -> None:
            with _Aside(recorder):
                run()

        thread.run = inside  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = recorded  # type: ignore[method-assign, assignment]


def _goes_first(tensor_type: type) -> bool:
    """Whether tensors of this type have a dispatch of their own.

    Plain tensors and parameters come by as types too, with a dispatch that is switched off; PyTorch's own pretended
    tensors communicate nothing and refuse to go first.
    """
    own = getattr(tensor_type, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl
    return own and not tensor_type.__module__.startswith("torch._subclasses")


_watched: dict[Any, bool] = {}


def _is_collective(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload):
        return False
    # Operators of these families without a group, like wait_tensor, move nothing between ranks.
    families = ("c10d", "_c10d_functional")
    return func.namespace in families and any(a.name in _GROUPS for a in func._schema.arguments)


def _base_name(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


def _record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Collective:
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    name = _base_name(func)
    operation = _PUBLIC_NAMES.get(name, name.removesuffix("_"))
    group = _group(named)
    ranks = tuple(dist.get_process_group_ranks(group))
    tensors = [] if operation == "barrier" else _taking_part(named)
    peer = next((named[key] for key in _PEERS if key in named), None)
    return Collective(
        operation,
        ranks,
        str(tensors[0].dtype).removeprefix("torch.") if tensors else None,
        sum(t.numel() for t in tensors),
        sum(t.numel() * t.element_size() for t in tensors),
        ranks[peer] if peer is not None and 0 <= peer < len(ranks) else None,
        named.get("tag", 0),
    )


def _group(named: dict[str, Any]) -> dist.ProcessGroup:
    if "process_group" in named:
        return dist.ProcessGroup.unbox(named["process_group"])
    group = named["group_name"]
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    found: dist.ProcessGroup = resolve(group) if isinstance(group, str) else group
    return found


def _taking_part(named: dict[str, Any]) -> list[torch.Tensor]:
    for keys in (_GIVES, _GETS):
        for key in keys:
            tensors = list(_tensors(named.get(key)))
            if tensors:
                return tensors
    return []


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def ordinal(number: int) -> str:
    """``1st``, ``2nd``, ``3rd``, ``4th``, ``11th`` ..."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
