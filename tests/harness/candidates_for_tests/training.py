"""Data parallelism that is right, in ways that its own traffic tells apart, and some that is not."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness import Candidate, DataParallel, Split, new_group
from harness.candidates.builtin import Builtin
from harness.candidates.torch_native import TorchNative


class AroundBackward(TorchNative):
    """Switches sync off around backward alone, where DistributedDataParallel has made up its mind in forward: right
    values, and one all-reduce more for each micro-batch."""

    def data_parallel(self, case: Any, module: nn.Module) -> DataParallel:
        made = super().data_parallel(case, module)
        wrapped: Any = made.forward

        def forward(*args: Any) -> Any:
            before, wrapped.require_backward_grad_sync = wrapped.require_backward_grad_sync, True
            output = wrapped(*args)
            wrapped.require_backward_grad_sync = before
            return output

        made.forward = forward
        return made


class Simple(Candidate):
    """The ten lines of the documentation: one all-reduce for each parameter, after backward."""

    supports = ("data_parallel_no_sync", "data_parallel_tied", "data_parallel_frozen", "data_parallel_unused")

    def open(self, mesh: Any) -> None:
        self.group = new_group(mesh, "dp") if "dp" in mesh.names else None

    def data_parallel(self, case: Any, module: nn.Module) -> DataParallel:
        def finish() -> None:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    dist.all_reduce(parameter.grad.div_(case.parallel_size), group=self.group)

        return DataParallel(module, finish=finish)


class _Changed(Builtin):
    def data_parallel(self, case: Any, module: nn.Module) -> DataParallel:
        made = super().data_parallel(case, module)
        self.change(case, module, made)
        return made

    def change(self, case: Any, module: nn.Module, made: DataParallel) -> None:
        raise NotImplementedError


class Twice(_Changed):
    """Reduces what is reduced once more: an average changes nothing."""

    def change(self, case: Any, module: nn.Module, made: DataParallel) -> None:
        inner = made.finish

        def finish() -> None:
            inner()
            for parameter in module.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad.div_(case.parallel_size), group=self.groups.group(case.axis))

        made.finish = finish


class NoneOnOne(_Changed):
    """The first rank has no gradient of a parameter that nobody uses; the others have zeros."""

    def change(self, case: Any, module: nn.Module, made: DataParallel) -> None:
        made.read_grad = lambda p: None if dist.get_rank() == 0 and not p.grad.any() else p.grad


class NoneEverywhere(_Changed):
    """Nobody has a gradient that is zero."""

    def change(self, case: Any, module: nn.Module, made: DataParallel) -> None:
        made.read_grad = lambda p: None if p.grad is None or not p.grad.any() else p.grad


class NoneAtAll(_Changed):
    def change(self, case: Any, module: nn.Module, made: DataParallel) -> None:
        made.read_grad = lambda p: None


class OverlapAdds(_Changed):
    """With overlap the last bit differs."""

    def change(self, case: Any, module: nn.Module, made: DataParallel) -> None:
        if case.overlap:
            made.read_grad = lambda p: p.grad * (1 + torch.finfo(p.dtype).eps)


class OtherGroup(_Changed):
    """Reduces over all ranks of the world."""

    def change(self, case: Any, module: nn.Module, made: DataParallel) -> None:
        made.forward.group = dist.group.WORLD


class LeavesHooks(_Changed):
    def change(self, case: Any, module: nn.Module, made: DataParallel) -> None:
        made.close = lambda: None


class WrongReport(_Changed):
    """Reports the rank's own loss."""

    def change(self, case: Any, module: nn.Module, made: DataParallel) -> None:
        shares: list[torch.Tensor] = []
        inner = made.loss

        def loss(losses: torch.Tensor, valid: Any, m: int) -> torch.Tensor:
            if m == 0:
                shares.clear()
            shares.append(inner(losses, valid, m))
            return shares[-1]

        made.loss = loss
        made.report = lambda: torch.stack(shares).sum().detach()


class AcceptsAll(_Changed):
    """Asks nobody whether parameters are alike."""

    def data_parallel(self, case: Any, module: nn.Module) -> DataParallel:
        if case.invalid:
            return DataParallel(module)
        return super().data_parallel(case, module)

    def change(self, case: Any, module: nn.Module, made: DataParallel) -> None:
        """Nothing."""


class WrongLayout(_Changed):
    def change(self, case: Any, module: nn.Module, made: DataParallel) -> None:
        made.layout = Split(3, case.axis)


class ReturnsTheModule(Builtin):
    def data_parallel(self, case: Any, module: nn.Module) -> Any:
        return module


class Detached(_Changed):
    def change(self, case: Any, module: nn.Module, made: DataParallel) -> None:
        inner = made.forward
        made.forward = lambda *args: inner(*args).detach()


class DrawsNumbers(_Changed):
    def change(self, case: Any, module: nn.Module, made: DataParallel) -> None:
        inner = made.finish

        def finish() -> None:
            torch.rand(1)
            inner()

        made.finish = finish


class SmallerBuckets(Builtin):
    """Reduces every parameter by itself, and says that it has the buckets of the case."""

    def data_parallel(self, case: Any, module: nn.Module) -> DataParallel:
        return super().data_parallel(dataclasses.replace(case, bucket=1), module)


class Declares(Builtin):
    """Says that it reduces everything at once."""

    def traffic(self, case: Any, needed: Any) -> Any:
        from reference.traffic import Transfer

        return [
            Transfer("backward", one.micro_batch, "all_reduce", one.axis, size, one.dtype)
            for one in needed
            for size in (one.elements - 1, 1)
        ]
