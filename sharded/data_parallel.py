"""Data parallelism: gradients of all ranks, reduced in buckets while backward runs.

A bucket is reduced as soon as it and those before it are complete, so that all ranks reduce in one order, whatever the
order in which their gradients come. A parameter that a rank does not use never comes: what is still waiting is
reduced by `DistributedDataParallel.finish`, and no rank waits for another's hook. (Buckets in the reverse order of use,
overlapped with backward: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from sharded import buckets
from sharded.alike import require_alike
from sharded.buckets import Bucket
from sharded.main_grad import attach

Reduction = Literal["average", "sum"]


class DistributedDataParallel(nn.Module):
    """Wraps a module whose parameters are alike on all ranks of a group.

    Call it as the module; after a backward call `finish`: then the gradient of every parameter that trains is that of
    all ranks, a parameter that none used has zeros, and all ranks hold the same bits. Gradients that were finished
    before and are not zeroed stay, and new ones are added. Backwards inside `no_sync` accumulate on the rank; those
    of the next backward outside are reduced with its own.

    bucket_elements: of a bucket, see `sharded.buckets.plan`. reduction: of the ranks' gradients. reduce_dtype: of the
    wire, by default that of the gradients. gradient_as_view: ``grad`` is a part of a bucket, and no copy. overlap:
    start in backward; the result has the same bits either way. main_grad: accumulate in fp32 in
    ``parameter.main_grad``.

    Raises ValueError, on every rank of the group, where parameters or these options differ between its ranks, and where
    an option is not one of those; on a rank outside of the group, where it is.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup,
        *,
        bucket_elements: int = 25_000_000,
        reduction: Reduction = "average",
        reduce_dtype: torch.dtype | None = None,
        gradient_as_view: bool = False,
        overlap: bool = True,
        main_grad: bool = False,
    ) -> None:
        super().__init__()
        require_member(group)
        options = f"bucket_elements={bucket_elements}, reduction={reduction!r}, reduce_dtype={reduce_dtype}"
        require_alike(module.named_parameters(), f"{options}, main_grad={main_grad}", group)
        if reduction not in ("average", "sum"):
            raise ValueError(f"reduction {reduction!r}: expected 'average' or 'sum'")
        self.module = module
        self.group = group
        self.overlap = overlap
        self.gradient_as_view = gradient_as_view
        self.main_grad = main_grad
        self._most, self._reduce_dtype = bucket_elements, reduce_dtype
        self._divide_by = group.size() if reduction == "average" else 1
        self._trained = [p for p in module.parameters() if p.requires_grad]
        if main_grad:
            for parameter in self._trained:
                attach(parameter)
        self._order: list[int] | None = None
        self._seen: list[int] = []
        self._syncs = True
        self._finished = False
        self._set_aside: dict[int, torch.Tensor] = {}
        self._arrange(range(len(self._trained))[::-1])
        self._handles = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda p, index=index: self._came(index, p)
            )
            for index, parameter in enumerate(self._trained)
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module. Raises RuntimeError where the reduction of the last backward was not finished."""
        if self._started:
            raise RuntimeError("the last backward's reduction is under way: call finish() before the next forward")
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: self._begin())  # type: ignore[no-untyped-call]
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate gradients on the rank and reduce nothing."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def finish(self) -> None:
        """Reduces what was not reduced in backward, and waits for all of it. Every rank of the group must call it."""
        for bucket in self._buckets[self._started :]:
            self._start(bucket)
        for bucket in self._buckets:
            bucket.finish()
            for index in bucket.members:
                self._hand_out(index, bucket)
        self._finished = True
        if self._order is None:
            self._rearrange()
        self._await()

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _arrange(self, order: Sequence[int]) -> None:
        """Makes the buckets, their members in this order."""
        sizes = [p.numel() for p in self._trained]
        dtypes = [self._kept(p) for p in self._trained]
        made = buckets.plan(sizes, dtypes, order, self._most)
        self._buckets = [
            Bucket.of(indices, sizes, dtypes[indices[0]], self._trained[indices[0]].device) for indices in made
        ]
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.members}
        self._await()

    def _await(self) -> None:
        """From now on every bucket waits for all of its members."""
        self._started = 0
        for bucket in self._buckets:
            bucket.waiting = set(bucket.members)

    def _rearrange(self) -> None:
        """After the first reduction: buckets in the order in which gradients came on the group's first rank."""
        rest = [index for index in reversed(range(len(self._trained))) if index not in self._seen]
        order = torch.tensor([*dict.fromkeys(self._seen), *rest], dtype=torch.int64)
        if self.group.size() > 1:
            dist.broadcast(order, group=self.group, group_src=0)
        self._order = order.tolist()
        self._arrange(self._order)
        if self.gradient_as_view:
            for index in range(len(self._trained)):
                self._into_bucket(index)

    def _begin(self) -> None:
        """A backward begins: what is reduced already stays out of the next reduction."""
        if not self._finished:
            return
        self._finished = False
        self._set_aside = {}
        for index, parameter in enumerate(self._trained):
            gradient = self._gradient(parameter)
            if gradient is not None:
                self._set_aside[index] = gradient.clone()
                gradient.zero_()

    def _came(self, index: int, parameter: torch.Tensor) -> None:
        """The gradient of one backward is complete, and added to the parameter's."""
        if self.main_grad:
            assert parameter.grad is not None
            attach(parameter).add_(parameter.grad)
            parameter.grad = None
        self._seen += [index] if self._order is None else []
        if self._syncs and self.overlap:  # what came without sync is not complete
            self._bucket_of[index].waiting.discard(index)
            self._start_complete()

    def _start_complete(self) -> None:
        while self._started < len(self._buckets) and not self._buckets[self._started].waiting:
            self._start(self._buckets[self._started])
            self._started += 1

    def _start(self, bucket: Bucket) -> None:
        for index in bucket.members:
            self._into_bucket(index)
        bucket.start(self.group, buckets.sent_in(bucket.flat.dtype, self._reduce_dtype), self._divide_by)

    def _into_bucket(self, index: int) -> None:
        """Brings the gradient to its place in the bucket; where there is none, zeros."""
        parameter, bucket = self._trained[index], self._bucket_of[index]
        place, gradient = bucket.view(index, parameter.shape), self._gradient(parameter)
        if gradient is None:
            place.zero_()
        elif gradient.data_ptr() != place.data_ptr():
            place.copy_(gradient)
        if self.gradient_as_view and not self.main_grad:
            parameter.grad = place

    def _hand_out(self, index: int, bucket: Bucket) -> None:
        """Gives the reduced gradient to the parameter, added to what was reduced before."""
        parameter = self._trained[index]
        total = bucket.view(index, parameter.shape)
        if index in self._set_aside:
            total.add_(self._set_aside[index])
        if self.main_grad:
            attach(parameter).copy_(total)
        elif not self.gradient_as_view:
            parameter.grad = total.clone()

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return attach(parameter) if self.main_grad else parameter.grad

    def _kept(self, parameter: torch.Tensor) -> torch.dtype:
        return attach(parameter).dtype if self.main_grad else parameter.dtype


def require_member(group: Any) -> None:
    """Raises ValueError where this rank is not in the group."""
    if not isinstance(group, ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the group that was given ({group!r}): pass the group along the "
            "data-parallel axis that this rank belongs to"
        )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for member in value.values():
            yield from _tensors(member)
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _tensors(member)
