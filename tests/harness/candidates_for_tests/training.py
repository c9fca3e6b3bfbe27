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


class WiderWire(Simple):
    """Reduces every parameter in fp32 at least, and declares the total."""

    def traffic(self, case: Any, needed: Any) -> Any:
        return [dataclasses.replace(one, dtype="float32") if case.kept.precision < 24 else one for one in needed]

    def data_parallel(self, case: Any, module: nn.Module) -> DataParallel:
        def finish() -> None:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    wide = found.to(torch.promote_types(found.dtype, torch.float32)) / case.parallel_size
                    dist.all_reduce(wide, group=self.group)
                    parameter.grad = wide.to(parameter.dtype)

        return DataParallel(module, finish=finish)


class PaddedReduceScatter(Candidate):
    """A reduce-scatter of equal pieces and an all-gather for each parameter; declared, or not."""

    declared = False

    def open(self, mesh: Any) -> None:
        self.group = new_group(mesh, "dp")

    def data_parallel(self, case: Any, module: nn.Module) -> DataParallel:
        def finish() -> None:
            for parameter in module.parameters():
                assert parameter.grad is not None
                grad, n = parameter.grad / case.parallel_size, case.parallel_size
                whole = torch.cat([grad.flatten(), grad.new_zeros(-grad.numel() % n)])
                own = whole.new_empty(len(whole) // n)
                dist.reduce_scatter_tensor(own, whole, group=self.group)
                dist.all_gather_into_tensor(whole, own, group=self.group)
                parameter.grad = whole[: grad.numel()].view(grad.shape).clone()

        return DataParallel(module, finish=finish)


class DeclaredReduceScatter(PaddedReduceScatter):
    def traffic(self, case: Any, needed: Any) -> Any:
        made = []
        for one in needed:
            reduced = dataclasses.replace(
                one, operation="reduce_scatter", elements=one.elements + 4, least=one.elements
            )
            made += [reduced, dataclasses.replace(one, operation="all_gather")]
        return made


class InTwoSteps(Candidate):
    """All-reduces over pairs of neighbours, then over those with the same place in their pair: twice the elements."""

    def open(self, mesh: Any) -> None:
        pairs = [[dist.new_group(ranks) for ranks in ([0, 1], [2, 3])], [dist.new_group(r) for r in ([0, 2], [1, 3])]]
        rank = dist.get_rank()
        self.steps = [pairs[0][rank // 2], pairs[1][rank % 2]]

    def traffic(self, case: Any, needed: Any) -> Any:
        return [dataclasses.replace(one, elements=2 * one.elements) for one in needed]

    def data_parallel(self, case: Any, module: nn.Module) -> DataParallel:
        def finish() -> None:
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(case.parallel_size)
                for group in self.steps:
                    dist.all_reduce(parameter.grad, group=group)

        return DataParallel(module, finish=finish)


class InTwoStepsUndeclared(InTwoSteps):
    def traffic(self, case: Any, needed: Any) -> Any:
        return needed


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
